"""A table and a plot of several training runs."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from tabulate import tabulate
from training import Result

matplotlib.use("Agg")  # draws without a display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

COLUMNS = (
    "optimizer",
    "final loss",
    "test accuracy",
    "steps",
    "seconds",
    "ms per step",
    "steps to {target:g}",
    "seconds to {target:g}",
)

# Colours of Okabe and Ito, which colour-blind readers can tell apart; names and line styles.
BLACK, ORANGE, GREEN = "black", "#E69F00", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, BLACK)
LINES = ("-", "--", "-.", ":")
CURVES = {
    "adamw": ("AdamW", BLACK, "--"),
    "sgd": ("SGD with momentum", BLACK, ":"),
    "adagrad": ("Adagrad", ORANGE, "-."),
    "adahessian": ("AdaHessian", ORANGE, "-"),
    "kfac": ("K-FAC", GREEN, (0, (6, 1))),
    "naturalgradient": ("natural gradient", PURPLE, (0, (4, 1, 1, 1))),
    "shampoo": ("Shampoo", BLUE, "-"),
    "shampoow": ("ShampooW", VERMILION, (0, (3, 1, 1, 1, 1, 1))),
}


def result_table(results: list[Result], target: float, table_format: str = "simple") -> str:
    """One row per run. "steps to TARGET" counts until the training loss first reaches `target`."""
    rows = []
    for result in results:
        steps, seconds = result.steps[-1], result.seconds[-1]
        steps_to_target, seconds_to_target = result.first_below(target) or (None, None)
        rows.append(
            (
                result.label,
                f"{result.losses[-1]:.4g}",
                f"{result.accuracy:.2%}",
                steps,
                f"{seconds:.1f}",
                f"{1000 * seconds / steps:.1f}",
                "-" if steps_to_target is None else steps_to_target,
                "-" if seconds_to_target is None else f"{seconds_to_target:.1f}",
            )
        )
    headers = [column.format(target=target) for column in COLUMNS]
    return tabulate(
        rows,
        headers,
        tablefmt=table_format,
        disable_numparse=True,
        colalign=("left",) + ("right",) * (len(headers) - 1),
    )


def draw_panel(axes: Axes, results: list[Result], target: float, i: int) -> None:
    """Training loss against steps (i = 0) or seconds (1); a dot where it first reaches the target."""
    reached = []
    for index, result in enumerate(results):
        other = (result.label, COLOURS[index % len(COLOURS)], LINES[index % len(LINES)])
        name, colour, line = CURVES.get(result.label, other)
        x = (result.steps, result.seconds)[i]
        axes.plot(x, result.losses, label=name, color=colour, linestyle=line, linewidth=1.4)
        first = result.first_below(target)
        if first is not None:
            at = result.steps.index(first[0])
            axes.plot(x[at], result.losses[at], "o", color=colour, markersize=5)
            reached.append(x[at])
    axes.axhline(target, color="grey", linewidth=1)
    longest = max((result.steps, result.seconds)[i][-1] for result in results)
    right = min(longest, 1.5 * max(reached)) if reached else longest
    axes.set(xlabel=("steps", "seconds of training")[i], yscale="log", xlim=(0, 1.02 * right))
    axes.grid(alpha=0.3)


def save_loss_plot(results: list[Result], target: float, title: str, path: Path) -> None:
    """Training loss against steps (left) and against seconds of training (right), as a PNG."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.4), sharey=True, layout="constrained")
    for i, axes in enumerate(panels):
        draw_panel(axes, results, target, i)
    by_steps = panels[0]
    by_steps.set_ylabel("training loss (nats per image)")
    low, high = by_steps.get_ylim()
    steps_of_ten = (1, 2, 5) if high < 200 * low else (1,)
    by_steps.yaxis.set_major_locator(LogLocator(subs=steps_of_ten))
    by_steps.yaxis.set_minor_locator(NullLocator())
    by_steps.yaxis.set_major_formatter(
        FuncFormatter(lambda loss, _: np.format_float_positional(loss, 6, trim="-"))
    )
    end = panels[1].get_xlim()[1]
    panels[1].text(1.02 * end, target, f"target\n{target:g}", va="center", fontsize=9)
    handles, labels = by_steps.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})
    plt.close(figure)
