"""Loss curves of a task's runs, and where they reach the baseline's loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from shared.plot_style import CURVES, plt, save

from learning.report import GOALS, crossings, target_of
from learning.runs import Run
from learning.task import Task

AxisOf = Callable[[Run], list[float]]  # steps or seconds of its records
Final = dict[str, list[Run]]  # the runs of each optimizer, one per seed


def mean_curve(runs: list[Run], axis: AxisOf) -> tuple[list[float], list[tuple[float, ...]]]:
    """Means of an axis, and the losses of all runs, at every record common to all of them."""
    axes = zip(*(axis(run) for run in runs), strict=False)
    losses = zip(*(run.losses for run in runs), strict=False)
    return list(map(statistics.mean, axes)), list(losses)


def draw_curves(panel: Axes, final: Final, axis: AxisOf) -> None:
    """Means and ranges over the seeds."""
    for optimizer, runs in final.items():
        name, colour, style = CURVES[optimizer]
        x, losses = mean_curve(runs, axis)
        means = list(map(statistics.mean, losses))
        panel.plot(x, means, label=name, color=colour, linestyle=style, linewidth=1.6)
        low, high = list(map(min, losses)), list(map(max, losses))
        panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.grid(alpha=0.3)


def means_to_target(task: Task, final: Final, target: float, i: int) -> dict[str, float]:
    """Mean steps (i = 0) or seconds (1) of each optimizer whose runs all reach the target."""
    ends = {}
    for optimizer, runs in final.items():
        reached = crossings(task, optimizer, runs, target)
        if reached is not None:
            ends[optimizer] = statistics.mean(pair[i] for pair in reached)
    return ends


def draw_target(panel: Axes, ends: dict[str, float], target: float) -> None:
    panel.axhline(target, color="grey", linewidth=1)
    for optimizer, end in ends.items():
        panel.plot(end, target, "o", color=CURVES[optimizer][1], markersize=5)


def label_end(panel: Axes, optimizer: str, end: float, target: float, ha: str, va: str) -> None:
    """The steps or seconds at a dot, below it or above it."""
    text = f"{end:.0f}" if end >= 100 else f"{end:.3g}"
    style = {"color": CURVES[optimizer][1], "fontsize": 9, "ha": ha, "va": va}
    offset = (0, -5 if va == "top" else 5)
    panel.annotate(text, (end, target), offset, textcoords="offset points", **style)


def draw_zoom(
    panel: Axes, task: Task, final: Final, axis: AxisOf, ends: dict[str, float], target: float
) -> None:
    """An inset where the curves reach the target, with the numbers of the first and the baseline."""
    lowest = min(map(target_of, final.values()))
    zoom = panel.inset_axes((0.47, 0.44, 0.51, 0.47))
    draw_curves(zoom, final, axis)
    draw_target(zoom, ends, target)
    right = min(1.1 * max(ends.values()), panel.get_xlim()[1])
    zoom.set(xlim=(0.8 * min(ends.values()), right), ylim=(lowest - 0.02 * target, 1.08 * target))
    base = task.baseline
    zoom.set_title(f"{panel.get_xlabel()} to {base}'s {GOALS[task.goal]}", fontsize=9)
    zoom.tick_params(labelsize=8)
    panel.indicate_inset_zoom(zoom, edgecolor="grey")
    first = min(ends, key=lambda optimizer: ends[optimizer])
    last = "left" if ends[base] < 0.9 * right else "center"  # right of its dot if there is room
    for optimizer, side in {first: "right", base: last}.items():
        label_end(zoom, optimizer, ends[optimizer], target, side, "top")


def draw(task: Task, final: Final, path: Path) -> None:
    """The loss that counts against steps and against seconds of training, as a PNG."""
    base = task.baseline
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.4), sharey=True, layout="constrained")
    axes: dict[str, AxisOf] = {
        "steps": lambda run: [float(step) for step in run.steps],
        "seconds": lambda run: run.seconds,
    }
    for i, (panel, (label, axis)) in enumerate(zip(panels, axes.items(), strict=True)):
        draw_curves(panel, final, axis)
        panel.set(xlabel=label, xlim=(0, None))
        if base in final:
            target = target_of(final[base])
            ends = means_to_target(task, final, target, i)
            panel.set_ylim(0.85 * min(map(target_of, final.values())), 2 * target)
            draw_target(panel, ends, target)
            if task.goal == "training":  # the curves end far below the target
                first = min(ends, key=lambda optimizer: ends[optimizer])
                for optimizer, end in ends.items():
                    sides = ("right", "top") if optimizer == first else ("left", "bottom")
                    label_end(panel, optimizer, end, target, *sides)
            else:
                draw_zoom(panel, task, final, axis, ends, target)
    if base in final:
        text = f"{base}'s\n{GOALS[task.goal]}\n{target:.4g}"
        panels[1].text(1.02 * panels[1].get_xlim()[1], target, text, va="center", fontsize=9)
    panels[0].set_ylabel(f"{task.goal} loss ({task.loss_unit})")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    save(figure, path)
