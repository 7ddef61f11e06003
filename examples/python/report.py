"""A table and a plot of several training runs."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from tabulate import tabulate
from training import Result

matplotlib.use("Agg")  # draws without a display
from matplotlib import pyplot as plt

COLUMNS = (
    "optimizer",
    "final loss",
    "test accuracy",
    "steps",
    "seconds",
    "ms a step",
    "steps to {target:g}",
    "seconds to {target:g}",
)


def result_table(results: list[Result], target: float, table_format: str = "simple") -> str:
    """One row per run. "steps to TARGET" counts until the training loss first reaches `target`."""
    rows = []
    for result in results:
        steps, seconds = result.steps[-1], result.seconds[-1]
        steps_to_target, seconds_to_target = result.first_below(target) or (None, None)
        rows.append(
            (
                result.label,
                f"{result.losses[-1]:.4f}",
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


def save_loss_plot(results: list[Result], target: float, title: str, path: Path) -> None:
    """Training loss against steps (left) and against seconds of training (right), as a PNG."""
    figure, (by_steps, by_seconds) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for result in results:
        by_steps.plot(result.steps, result.losses, label=result.label)
        by_seconds.plot(result.seconds, result.losses, label=result.label)
    for axes, name in ((by_steps, "steps"), (by_seconds, "seconds of training")):
        axes.set(xlabel=name, yscale="log")
        axes.axhline(target, color="grey", linewidth=0.8, linestyle=":")
        axes.grid(alpha=0.3)
    by_steps.set_ylabel("training loss")
    by_seconds.legend(frameon=False)
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
