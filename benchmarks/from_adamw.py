"""Shampoo.from_adamw against AdamW on Fashion-MNIST: the experiment behind its defaults.

Part 1 changes one default at a time, at AdamW's best learning rate, with one seed. Part 2 gives both the same
grid of learning rates and several seeds. docs/choosing_and_tuning.md describes the results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchium
from common import ROOT, Report, result_file

sys.path.append(str(ROOT / "examples" / "python"))
from image_data import ImageData, load_image_data
from training import Budget, train

STEPS = {"mlp": 300, "convnet": 200}
# AdamW's best, according to part 2.
ADAMW_RATE = {"mlp": 0.002, "convnet": 0.008}
RATES = {"mlp": (0.001, 0.002, 0.004), "convnet": (0.004, 0.008, 0.016)}

# Alternatives to each default. statistics_beta2 is the decay of the statistics alone: the grafted second
# moment keeps AdamW's.
ALTERNATIVES: dict[str, Sequence[Any]] = {
    "exponent": (None, -0.375),
    "relative_eps": (1e-6, 1e-5, 1e-3),
    "update_freq": (1, 100),
    "statistics_beta2": (0.95, 0.99, 1.0),
    "start_preconditioning_step": (10, 50),
    "block_size": (128, 256, 512),
}

Make = Callable[[Any], torch.optim.Optimizer]


def from_adamw(
    params: Any, lr: float, statistics_beta2: float | None = None, **options: Any
) -> Any:
    optimizer = torchium.Shampoo.from_adamw(params, lr=lr, **options)
    if statistics_beta2 is not None:  # the grafted second moment keeps its own decay
        for group in optimizer.param_groups:
            beta1, beta2 = group["betas"]
            group["grafting_beta2"] = group["grafting_beta2"] or beta2
            group["betas"] = (beta1, statistics_beta2)
    return optimizer


@dataclass(frozen=True)
class Summary:
    """Means over the seeds."""

    loss: float
    deviation: float  # of the loss
    accuracy: float  # on the test images, in percent
    milliseconds: float  # per step

    def row(self) -> list[object]:
        return [self.loss, self.deviation, self.accuracy, self.milliseconds]


class Runs:
    """Training runs on one data set."""

    def __init__(self, data: ImageData) -> None:
        self.data = data

    def summary(self, model: str, make: Make, seeds: int) -> Summary:
        budget = Budget(steps=STEPS[model])
        runs = [train(model, model, self.data, make, budget, seed=seed) for seed in range(seeds)]
        losses = [run.losses[-1] for run in runs]
        return Summary(
            statistics.mean(losses),
            statistics.stdev(losses) if seeds > 1 else 0.0,
            100 * statistics.mean(run.accuracy for run in runs),
            1e3 * statistics.median(run.seconds[-1] / run.steps[-1] for run in runs),
        )

    def shampoo(self, model: str, lr: float, seeds: int, **options: Any) -> Summary:
        return self.summary(model, partial(from_adamw, lr=lr, **options), seeds)

    def adamw(self, model: str, lr: float, seeds: int) -> Summary:
        return self.summary(model, partial(torch.optim.AdamW, lr=lr), seeds)


HEADERS = ["training loss", "deviation", "test accuracy, %", "ms per step"]


def one_default_at_a_time(report: Report, runs: Runs, models: Sequence[str]) -> None:
    for model in models:
        lr = ADAMW_RATE[model]
        rows = [
            ["AdamW", "", *runs.adamw(model, lr, 1).row()],
            ["defaults", "", *runs.shampoo(model, lr, 1).row()],
        ]
        for option, values in ALTERNATIVES.items():
            for value in values:
                rows.append([option, value, *runs.shampoo(model, lr, 1, **{option: value}).row()])
        report.table(f"One default changed, {model}, lr={lr}", ["option", "value", *HEADERS], rows)


def learning_rates(report: Report, runs: Runs, models: Sequence[str], seeds: int) -> None:
    for model in models:
        ours = {lr: runs.shampoo(model, lr, seeds) for lr in RATES[model]}
        theirs = {lr: runs.adamw(model, lr, seeds) for lr in RATES[model]}
        rows = [
            [name, lr, *summary.row()]
            for name, summaries in (("AdamW", theirs), ("Shampoo.from_adamw", ours))
            for lr, summary in summaries.items()
        ]
        title = f"Learning rates, {model}, {STEPS[model]} steps, {seeds} seeds"
        report.table(title, ["optimizer", "lr", *HEADERS], rows)
        ratio = min(s.loss for s in ours.values()) / min(s.loss for s in theirs.values())
        report.check(f"{model}: best loss of from_adamw / that of AdamW", ratio, 0.9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/*.md")
    parser.add_argument("--seeds", type=int, default=3, help="of part 2 (default: 3)")
    parser.add_argument("--models", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--data-dir", type=Path, help="folder of the .gz files of Fashion-MNIST")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    report = Report("AdamW and Shampoo.from_adamw")
    cache = ROOT / ".data" / "fashion-mnist"
    data = load_image_data("fashion-mnist", arguments.data_dir, cache)
    runs = Runs(data)
    one_default_at_a_time(report, runs, arguments.models)
    learning_rates(report, runs, arguments.models, arguments.seeds)
    return report.finish(result_file("from_adamw", arguments))


if __name__ == "__main__":
    sys.exit(main())
