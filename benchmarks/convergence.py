"""Training a character Transformer on the King James Bible: ours against AdamW and Muon.

Every optimizer gets the same learning rates on one seed; with the best of them it is run again on
the other seeds. Runs are kept in a folder, and those that are there already are not repeated: so
the whole can be split over several calls, and the last one writes the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch
from bible_text import load_bible
from common import ROOT, Report
from convergence_report import best_lr, comparison, draw, grid_table
from convergence_training import OPTIMIZERS, Run, Settings, train
from transformer_model import Shape, Text, Transformer

TINY = Settings(Shape(layers=2, width=32, heads=2, context=32), 4, 12, 2, 4)


class Runs:
    """All runs of a folder, and those of this call, which go to a file of their own."""

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
    """Which runs there are to be, and which of them there are."""

    def __init__(self, arguments: argparse.Namespace, text: Text, settings: Settings) -> None:
        self.names: list[str] = arguments.optimizers
        self.grid: list[float] = arguments.grid
        self.tuning_seed: int = arguments.tuning_seed
        self.seeds: list[int] = arguments.seeds
        self.text, self.settings = text, settings
        self.runs = Runs(arguments.runs)
        self.end = time.monotonic() + arguments.seconds
        self.left_out = 0

    def comparable(self) -> list[Run]:
        """Known runs of the same length under the same conditions."""
        wanted = (self.settings.steps, self.settings.conditions(self.text.train.device))
        return [run for run in self.runs.known.values() if run.key[3:] == wanted]

    def need(self, name: str, lr: float, seed: int) -> None:
        if any(run.key[:3] == (name, lr, seed) for run in self.comparable()):
            return
        if time.monotonic() > self.end:
            self.left_out += 1
            return
        run = train(self.text, self.settings, name, lr, seed)
        self.runs.add(run)
        ms = sum(run.optimizer_ms) / len(run.optimizer_ms)
        print(
            f"{name}, lr {lr:g}, seed {seed}: validation loss {run.validation_losses[-1]:.4f}, "
            f"{run.seconds[-1]:.1f} s, {ms:.2f} ms of optimizer a step",
            flush=True,
        )

    def tuning(self) -> list[Run]:
        return [run for run in self.comparable() if run.seed == self.tuning_seed]

    def warm_up(self) -> None:
        """First calls of kernels and libraries, which no run should pay for."""
        short = dataclasses.replace(self.settings, steps=3, warm_up=1, evaluate_every=3)
        for name in self.names:
            train(self.text, short, name, 1e-5, 0)

    def run(self) -> None:
        self.warm_up()
        for name in self.names:
            for lr in self.grid:
                self.need(name, lr, self.tuning_seed)
        for seed in self.seeds:  # outermost, so that a run that is cut short has whole seeds
            for name in self.names:
                lr = best_lr(self.tuning(), name)
                if lr is not None:
                    self.need(name, lr, seed)

    def final(self) -> dict[str, list[Run]]:
        """The runs at the best learning rate of each optimizer, on seeds not tuned on."""
        result = {}
        for name in OPTIMIZERS:
            lr = best_lr(self.tuning(), name)
            found = [
                run
                for run in self.comparable()
                if run.seed != self.tuning_seed and (run.optimizer, run.lr) == (name, lr)
            ]
            if found:
                result[name] = found
        return result


def describe(report: Report, text: Text, settings: Settings) -> None:
    shape = settings.shape
    parameters = sum(p.numel() for p in Transformer(text.symbols, shape).parameters())
    products = "bfloat16 autocast" if text.train.is_cuda else "no autocast"
    report.write(
        f"{shape.layers} layers, width {shape.width}, {parameters / 1e6:.3g} M parameters; "
        f"{settings.batch} sequences of {shape.context} characters a step, {settings.steps} steps, "
        f"{settings.warm_up} of warm-up, then a cosine to zero; {products}. "
        f"{len(text.train):,} characters to train on, {len(text.validation):,} to validate on. "
        f"Seconds are those of training alone ({settings.conditions(text.train.device)})."
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS)
    )
    parser.add_argument("--grid", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3, 4e-3])
    parser.add_argument("--tuning-seed", type=int, default=0)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--graph", action="store_true", help="capture forward and backward pass")
    parser.add_argument(
        "--tf32", action="store_true", help="float32 products of the optimizers may use TF32"
    )
    parser.add_argument(
        "--runs", type=Path, default=ROOT / ".cache" / "transformer", help="folder of the runs"
    )
    parser.add_argument("--data-dir", type=Path, default=ROOT / ".data", help="folder of the text")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new run after this time")
    parser.add_argument("--report-only", action="store_true", help="start no run")
    parser.add_argument("--save", type=Path, help="write the tables to this file")
    parser.add_argument("--plot", type=Path, help="write the loss curves to this PNG")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a small model on the text of this program, 12 steps: shows that all of it runs; the "
        "numbers mean nothing",
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.tf32:
        torch.set_float32_matmul_precision("high")
    if arguments.tiny:
        content, settings = Path(__file__).read_bytes(), TINY
    else:
        try:
            content = load_bible(arguments.data_dir)
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
            return 2
        settings = Settings(steps=arguments.steps, graph=arguments.graph)
    text = Text(content, arguments.device)
    experiment = Experiment(arguments, text, settings)
    if not arguments.report_only:
        experiment.run()
    is_cuda = text.train.is_cuda
    name = torch.cuda.get_device_name() if is_cuda else "a CPU"
    report = Report(f"A character Transformer on {name}")
    describe(report, text, settings)
    if experiment.left_out:
        report.skip(f"{experiment.left_out} runs", "out of time")
    grid_table(report, experiment.tuning(), list(OPTIMIZERS))
    final = experiment.final()
    comparison(report, final)
    missed = report.finish(arguments.save)
    if arguments.plot and final:
        draw(final, arguments.plot)
    return 0 if arguments.tiny else missed


if __name__ == "__main__":
    sys.exit(main())
