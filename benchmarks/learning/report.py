"""Tables of a task's runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from shared.common import Report

from learning.runs import Run
from learning.task import Targets, Task

GOALS = {"validation": "final loss", "training": "lowest loss"}


def mean_losses(runs: Sequence[Run], optimizer: str) -> dict[float, float]:
    """The mean over the seeds of the losses reached, by learning rate."""
    losses: dict[float, list[float]] = {}
    for run in runs:
        if run.optimizer == optimizer:
            losses.setdefault(run.lr, []).append(run.reached[0])
    return {lr: statistics.mean(values) for lr, values in losses.items()}


def best_lr(runs: Sequence[Run], optimizer: str) -> float | None:
    """The learning rate of the lowest mean over the seeds that have run; None if all diverged."""
    means = mean_losses(runs, optimizer)
    best = min(means, key=lambda lr: means[lr], default=None)
    return best if best is not None and math.isfinite(means[best]) else None


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and half the range: three runs are too few for a deviation."""
    half = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):.{digits}f} ± {half:.{digits}f}"


def grid_table(report: Report, task: Task, runs: Sequence[Run], tuning_seed: int) -> None:
    tuning = [run for run in runs if run.seed == tuning_seed]
    rates = sorted({run.lr for run in tuning})
    rows, at_edge, means = [], [], []
    for name in task.grids:
        losses = {run.lr: run.reached[0] for run in tuning if run.optimizer == name}
        if not losses:
            continue
        for lr, mean in sorted(mean_losses(runs, name).items()):
            count = sum((run.optimizer, run.lr) == (name, lr) for run in runs)
            if count > 1:
                means.append(f"{name} at {lr:g}: {mean:.4g} ({count})")
        rows.append([name, *(losses.get(lr) for lr in rates)])
        best = min(losses, key=lambda lr: losses[lr])
        if best in (min(losses), max(losses)):
            at_edge.append(name)
    report.table(
        f"{GOALS[task.goal].capitalize()} ({task.goal}) for each learning rate, one seed",
        ["optimizer", *(f"{lr:g}" for lr in rates)],
        rows,
        ".5g",
    )
    if at_edge:
        report.write(f"Best at an end of its grid: {', '.join(at_edge)}.")
    if means:
        report.write(f"Means over several seeds (their number): {', '.join(means)}.")


def target_of(baseline: Sequence[Run]) -> float:
    """The loss that the others are to reach."""
    return statistics.mean(run.reached[0] for run in baseline)


def crossings(
    task: Task, name: str, runs: Sequence[Run], loss: float
) -> list[tuple[float, float]] | None:
    """Steps and seconds to `loss` for every run; None if one of them does not reach it.

    Those of the baseline are to the loss that the run reaches, of which `loss` is the mean.
    """
    if name == task.baseline:
        return [run.reached[1:] for run in runs]
    found = [run.first_below(loss) for run in runs]
    return None if None in found else [pair for pair in found if pair is not None]


def check_targets(
    report: Report, task: Task, targets: Targets, ratios: Sequence[float], optimizer_ms: float
) -> None:
    """`ratios`: steps and seconds to the baseline's loss, over the baseline's."""
    name, base = targets.optimizer, task.baseline
    most = (targets.steps, targets.seconds)
    for what, ratio, at_most in zip(("steps", "seconds"), ratios, most, strict=True):
        report.check(f"{name}: {what} to {base}'s {GOALS[task.goal]} / {base}'s", ratio, at_most)
    if targets.optimizer_ms is not None:
        what = f"{name}: optimizer ms per step / {targets.optimizer_ms:g}"
        report.check(what, optimizer_ms / targets.optimizer_ms, 1.0)


def comparison(report: Report, task: Task, final: dict[str, list[Run]]) -> None:
    """`final`: the runs of each optimizer at its best learning rate, one per seed."""
    base = task.baseline
    baseline = final.get(base)
    if not baseline:
        report.skip(f"comparison with {base}", "no run of it")
        return
    target = target_of(baseline)
    whole = [statistics.mean(run.reached[i] for run in baseline) for i in (1, 2)]
    with_accuracy = all(run.accuracies for runs in final.values() for run in runs)
    rows = []
    for name, runs in final.items():
        optimizer_ms = statistics.mean(statistics.mean(run.optimizer_ms) for run in runs)
        step_ms = statistics.mean(1e3 * run.seconds[-1] / run.steps[-1] for run in runs)
        row = [name, runs[0].lr, len(runs)]
        row += [spread([min(run.validation_losses) for run in runs], 4)]
        row += [spread([run.validation_losses[-1] for run in runs], 4)]
        row += [spread([run.train_losses[-1] for run in runs], 4)]
        if with_accuracy:
            row += [spread([100 * run.accuracies[-1] for run in runs], 2)]
        reached = crossings(task, name, runs, target)
        ratios = [math.inf, math.inf]
        if reached is None:
            row += ["-"] * 4
        else:
            to_steps, to_seconds = ([pair[i] for pair in reached] for i in (0, 1))
            ratios = [statistics.mean(to_steps) / whole[0], statistics.mean(to_seconds) / whole[1]]
            row += [spread(to_steps, 0), spread(to_seconds, 2), *(f"{r:.3f}" for r in ratios)]
        for targets in task.targets:
            if name == targets.optimizer:
                check_targets(report, task, targets, ratios, optimizer_ms)
        rows.append([*row, step_ms, optimizer_ms])
    headers = ["optimizer", "lr", "seeds", "best validation loss", "final", "final training loss"]
    headers += ["final accuracy, %"] * with_accuracy
    headers += [f"{what} to {target:.4f}" for what in ("steps", "seconds")]
    headers += [f"steps / {base}'s", f"seconds / {base}'s", "ms per step", "optimizer ms"]
    title = f"At the best learning rate; {base}'s {GOALS[task.goal]} ({task.goal}) is {target:.4f}"
    report.table(title, headers, rows, ".4g")
