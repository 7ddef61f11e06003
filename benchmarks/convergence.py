"""Convergence: Shampoo against AdamW and Muon, K-FAC and natural gradient against SGD with momentum.

Every optimizer runs the same learning rates with one seed, then the best of them with the other seeds; while
another rate has a lower mean then, that one too. Runs are saved in a folder and not repeated: the benchmark can be split
over several calls, and the last one writes the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch
from learning.bible_text import load_bible
from learning.convnet_task import ConvNetTask, load_images
from learning.curvature_task import CurvatureConvNetTask, CurvatureMlpTask
from learning.optimizers import OPTIMIZERS
from learning.report import best_lr, comparison, grid_table
from learning.runs import Run, train
from learning.task import Settings, Task
from learning.transformer_task import TransformerTask
from networks.transformer_model import Shape
from shared.common import ROOT, Report

IMAGE_TASKS = {task.name: task for task in (ConvNetTask, CurvatureMlpTask, CurvatureConvNetTask)}
TASKS = (TransformerTask.name, *IMAGE_TASKS)
TINY_SHAPE = Shape(layers=2, width=32, heads=2, context=32)
TINY = Settings(batch=4, steps=12, warm_up=2, evaluate_every=4)


class Runs:
    """All runs of a folder; those of this call go to a new file."""

    def __init__(self, folder: Path) -> None:
        self.known: dict[tuple[object, ...], Run] = {}
        parts = sorted(folder.glob("*.json"))
        for part in parts:
            for values in json.loads(part.read_text()):
                run = Run(**values)
                self.known[run.key] = run
        self._new: list[Run] = []
        self._path = folder / f"runs-{len(parts):02}.json"

    def add(self, run: Run) -> None:
        self.known[run.key] = run
        self._new.append(run)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps([dataclasses.asdict(run) for run in self._new]))


class Experiment:
    """The planned runs, and the completed ones."""

    def __init__(self, arguments: argparse.Namespace, task: Task, settings: Settings) -> None:
        names = arguments.optimizers or list(task.grids)
        self.grids = {name: arguments.grid or task.grids[name] for name in names}
        self.tuning_seed: int = arguments.tuning_seed
        self.seeds: list[int] = arguments.seeds
        self.task, self.settings = task, settings
        self.runs = Runs(arguments.runs or ROOT / ".cache" / task.name)
        self.end = time.monotonic() + arguments.seconds
        self.left_out = 0

    def comparable(self) -> list[Run]:
        """Known runs of this task with the same length and conditions."""
        conditions = self.settings.conditions(self.task.device)
        wanted = (self.task.name, self.settings.steps, conditions)
        return [run for run in self.runs.known.values() if run.key[3:] == wanted]

    def need(self, name: str, lr: float, seed: int) -> None:
        if any(run.key[:3] == (name, lr, seed) for run in self.comparable()):
            return
        if time.monotonic() > self.end:
            self.left_out += 1
            return
        run = train(self.task, self.settings, name, lr, seed)
        self.runs.add(run)
        ms = sum(run.optimizer_ms) / len(run.optimizer_ms)
        print(
            f"{name}, lr {lr:g}, seed {seed}: {run.goal} loss {run.losses[-1]:.4f}, "
            f"{run.seconds[-1]:.1f} s, {ms:.2f} optimizer ms per step",
            flush=True,
        )

    def best_rates(self) -> dict[str, float]:
        """Of the optimizers that have run and not diverged at every rate; they change with more seeds."""
        runs = self.comparable()
        rates = {name: best_lr(runs, name) for name in self.task.grids}
        return {name: lr for name, lr in rates.items() if lr is not None}

    def warm_up(self) -> None:
        """First calls of kernels and libraries, excluded from all runs."""
        short = dataclasses.replace(self.settings, steps=3, warm_up=1, evaluate_every=3)
        for name in self.grids:
            train(self.task, short, name, 1e-5, 0)

    def run(self) -> None:
        self.warm_up()
        for name, grid in self.grids.items():
            for lr in grid:
                self.need(name, lr, self.tuning_seed)
        tried: dict[str, float] = {}
        while tried != (rates := self.best_rates()):
            tried = rates
            for seed in self.seeds:  # outermost, so that an interrupted call has complete seeds
                for name in self.grids:
                    if name in rates:
                        self.need(name, rates[name], seed)

    def final(self) -> dict[str, list[Run]]:
        """The runs at each optimizer's best learning rate, on the seeds not used for tuning."""
        result = {}
        for name, lr in self.best_rates().items():
            found = [
                run
                for run in self.comparable()
                if run.seed != self.tuning_seed and (run.optimizer, run.lr) == (name, lr)
            ]
            if found:
                result[name] = found
        return result


def make_task(arguments: argparse.Namespace) -> Task:
    """Raises FileNotFoundError if the data are not there and cannot be downloaded."""
    folder, device = arguments.data_dir, arguments.device
    if arguments.task in IMAGE_TASKS:
        name = "digits" if arguments.tiny else "fashion-mnist"
        return IMAGE_TASKS[arguments.task](load_images(name, folder), device)
    if arguments.tiny:
        return TransformerTask(Path(__file__).read_bytes(), TINY_SHAPE, device)
    return TransformerTask(load_bible(folder or ROOT / ".data"), Shape(), device)


def describe(report: Report, task: Task, settings: Settings) -> None:
    report.write(
        f"{task.describe(settings)} {settings.steps} steps, {settings.warm_up} of warm-up, then a "
        "cosine to zero. Seconds are those of training alone "
        f"({settings.conditions(task.device)})."
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), help="default: those of the task"
    )
    parser.add_argument(
        "--grid", nargs="+", type=float, help="learning rates (default: those of the task)"
    )
    parser.add_argument("--tuning-seed", type=int, default=0)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="default: those of the task")
    parser.add_argument("--graph", action="store_true", help="capture forward and backward pass")
    parser.add_argument(
        "--tf32", action="store_true", help="float32 products and convolutions may use TF32"
    )
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: .cache/TASK)")
    parser.add_argument(
        "--data-dir", type=Path, help="folder of the text, or of the .gz files of Fashion-MNIST"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="no new run after this time")
    parser.add_argument("--report-only", action="store_true", help="start no run")
    parser.add_argument("--save", type=Path, help="write the tables to this file")
    parser.add_argument("--plot", type=Path, help="write the loss curves to this PNG")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="12 steps on small data: a small Transformer on the text of this program, the others "
        "on scikit-learn's digits. A smoke test; the numbers are meaningless",
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.tf32:
        torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = arguments.tf32
    try:
        task = make_task(arguments)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    settings = TINY
    if not arguments.tiny:
        steps = arguments.steps or task.settings.steps
        settings = dataclasses.replace(task.settings, steps=steps, graph=arguments.graph)
    others = set(arguments.optimizers or ()) - set(task.grids)
    if others:
        print(
            f"--task {task.name} has no {', '.join(sorted(others))}, only {', '.join(task.grids)}",
            file=sys.stderr,
        )
        return 2
    experiment = Experiment(arguments, task, settings)
    if not arguments.report_only:
        experiment.run()
    name = torch.cuda.get_device_name() if task.device.type == "cuda" else "a CPU"
    report = Report(f"{task.title} on {name}")
    describe(report, task, settings)
    if experiment.left_out:
        report.skip(f"{experiment.left_out} runs", "out of time")
    grid_table(report, task, experiment.comparable(), experiment.tuning_seed)
    final = experiment.final()
    comparison(report, task, final)
    missed = report.finish(arguments.save)
    if arguments.plot and final:
        from learning.plot import draw

        draw(task, final, arguments.plot)
    return 0 if arguments.tiny else missed


if __name__ == "__main__":
    sys.exit(main())
