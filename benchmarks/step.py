"""One step of Shampoo on a CUDA device: time, memory, launches, and where the time goes.

Beside it AdamW, and other implementations from PyPI where they are installed (pytorch-optimizer,
ista-daslab-optimizers). All optimizers step the same parameters with the same gradients: ours and
AdamW in turns, then the others one by one. Where roots are computed in every tenth step, a row shows
a step with roots, one without, and the mean.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import Report
from roots import Clock
from step_contestants import Contestant, Steps, contestants
from step_costs import Rates, iterations, needed
from step_profile import SHARES, StepProfile, profiled
from step_shapes import MODELS, TINY_MODELS, Gradients, Model
from step_targets import check_targets

FAMILIES = ("ours", "adamw", "pytorch-optimizer", "dash")
EXPONENTS = (1.0, 2.0)  # of the gradients' spectra
WARM_UP = 10
STEPS_A_ROUND = 5  # of optimizers whose steps all cost the same
GB = 1e9


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@dataclass
class Entry:
    """One optimizer at work on one model."""

    contestant: Contestant
    gradients: Gradients
    clock: Clock
    optimizer: Steps | None = None
    count: int = 0
    rounds: list[list[float]] = field(default_factory=list)  # ms of each step of a cycle
    spent: float = 0.0  # seconds
    state: float | None = None  # bytes over parameters and gradients
    peak: float | None = None
    profiles: list[StepProfile] = field(default_factory=list)
    note: str = ""

    @property
    def is_cuda(self) -> bool:
        return self.clock.device != "cpu"

    def step(self) -> None:
        self.optimizer.step()

    def feed(self) -> None:
        self.gradients.feed(self.contestant.exponent, self.count)
        self.count += 1

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Accounts its time; a failure takes it out of the race and is shown in its row."""
        start = time.monotonic()
        try:
            with tf32(self.contestant.tf32):
                yield
                if self.is_cuda:
                    torch.cuda.synchronize()
        except Exception as error:  # whatever a peer raises belongs in the table
            place = traceback.extract_tb(error.__traceback__)[-1]
            lines = [*str(error).strip().splitlines(), f"in {Path(place.filename).name}"]
            self.note = f"{type(error).__name__}: {lines[0]}"[:120]
            self.optimizer = None
        self.spent += time.monotonic() - start

    def prepare(self, most_seconds: float) -> None:
        """Makes it, warms it up, and sees what memory that took."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if self.is_cuda else 0
        with self.turn():
            self.feed()
            self.optimizer = self.contestant.make(self.gradients.parameters)
            start = time.monotonic()
            for _ in range(WARM_UP):
                self.step()
                self.feed()
                if self.is_cuda:
                    torch.cuda.synchronize()
                if time.monotonic() - start > most_seconds:
                    break
        if self.is_cuda:
            self.state = torch.cuda.memory_allocated() - before
            self.peak = torch.cuda.max_memory_allocated() - before

    def round(self) -> None:
        """A cycle of steps, not waited for in between."""
        cycle = self.contestant.cycle
        marks = []
        with self.turn():
            for _ in range(cycle if cycle > 1 else STEPS_A_ROUND):
                self.feed()
                start = self.clock.mark()
                self.step()
                marks.append((start, self.clock.mark()))
        if self.optimizer is not None:
            self.rounds.append([self.clock.between(*pair) for pair in marks])

    def profile(self) -> None:
        """Of the step with roots, where only some have them, and of one without."""
        watched = {self.due(), self.due() - 1} if self.contestant.cycle > 1 else {0}
        with self.turn():
            for position in range(self.contestant.cycle):
                self.feed()
                if position in {w % self.contestant.cycle for w in watched}:
                    self.profiles.append(profiled(self.step, self.is_cuda))
                else:
                    self.step()

    def positions(self) -> list[float]:
        """Milliseconds of each step of a cycle."""
        return [statistics.median(values) for values in zip(*self.rounds, strict=True)]

    def due(self) -> int:
        """Which step of a cycle has roots: the longest."""
        positions = self.positions()
        return max(range(len(positions)), key=lambda i: positions[i])

    def times(self) -> tuple[float | None, float | None, float | None]:
        """Milliseconds: the mean step, one with roots, and one without."""
        if not self.rounds:
            return None, None, None
        positions, due = self.positions(), self.due()
        if self.contestant.cycle == 1:
            return statistics.median(positions), None, None
        others = positions[:due] + positions[due + 1 :]
        return statistics.mean(positions), positions[due], statistics.median(others)


class StepClock(Clock):
    """Marks on the stream, which nothing waits for until their distance is asked for."""

    def mark(self) -> object:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start, end) -> float:
        """Milliseconds; the device must have passed both."""
        return 1e3 * (end - start) if self.device == "cpu" else start.elapsed_time(end)


def race(entries: list[Entry], rounds: int, most_seconds: float) -> None:
    """All take their turns, in another order every round; slow ones take fewer."""
    shuffle = random.Random(0).sample
    for entry in entries:
        entry.prepare(most_seconds)
    for r in range(rounds):
        for entry in shuffle(entries, len(entries)):
            if entry.optimizer is not None and (r == 0 or entry.spent < most_seconds):
                entry.round()
    for entry in entries:
        if entry.optimizer is not None and entry.spent < 2 * most_seconds:
            entry.profile()
        entry.optimizer = None  # and its memory


def gigabytes(count: float | None) -> float | None:
    return None if count is None else count / GB


def times_table(report: Report, model: Model, entries: list[Entry]) -> None:
    rows = []
    for entry in entries:
        contestant = entry.contestant
        by_time = sorted(entry.profiles, key=lambda p: p.total_ms)  # the first has no roots
        row = [contestant.name, "yes" if contestant.tf32 else "no", f"i^-{contestant.exponent:g}"]
        row += [*entry.times(), gigabytes(entry.state), gigabytes(entry.peak)]
        row += [f"{p.calls} / {p.kernels}" if p.calls else None for p in by_time]
        row += [None] * (2 - len(by_time))
        rows.append([*row, len(entry.rounds), entry.note])
    headers = ["optimizer", "TF32", "spectrum", "ms a step", "with roots", "without"]
    headers += ["state GB", "peak GB", "calls / kernels", "with roots"]
    report.table(
        f"{model.name}: {len(model.shapes)} parameters, {model.parameters / 1e6:.1f} M elements",
        [*headers, "rounds", "note"],
        rows,
    )


def shares_table(
    report: Report, model: Model, entries: list[Entry], rates: Rates, gradients: Gradients
) -> None:
    """Of our eager steps: kernel time by range, beside what the device needs for it at the least."""
    rows = []
    for entry in entries:
        contestant = entry.contestant
        if not contestant.is_ours or "graphs" in contestant.name or not entry.profiles:
            continue
        with_roots = contestant.cycle == 1
        found = min(entry.profiles, key=lambda p: p.total_ms)
        if found.total_ms == 0.0:
            report.write(f"{contestant.name}: the profiler saw no kernels.")
            continue
        costs = needed(model, iterations(gradients, model, contestant.exponent))
        if not with_roots:
            del costs["roots"]
        setting = f"TF32 {'yes' if contestant.tf32 else 'no'}, i^-{contestant.exponent:g}, "
        setting += "with roots" if with_roots else "without"
        for share in SHARES:
            ms = found.ms[share]
            row = [setting, share, ms, 100 * ms / found.total_ms, found.launched[share]]
            if cost := costs.get(share):
                # Roots keep their accuracy in either setting, by products of fp16 terms.
                tflops = rates.fp16 if share == "roots" else rates.products(contestant.tf32)
                roof = rates.milliseconds(cost.operations, cost.bytes, tflops)
                row += [cost.operations * 1e-9, cost.bytes / GB, roof]
                row += [100 * roof / ms if ms else None]
            rows.append(row)
        rows.append([setting, "all", found.total_ms, 100.0, found.kernels])
    if rows:
        headers = ["setting", "share", "ms", "%", "kernels"]
        headers += ["G operations", "GB", "ms at the roof", "% of the roof"]
        report.table(f"{model.name}: time of the kernels of a step, by its parts", headers, rows)


def measure(
    report: Report, key: str, model: Model, arguments: argparse.Namespace, rates: Rates
) -> None:
    clock = StepClock(arguments.device, arguments.rounds)
    gradients = Gradients(model, EXPONENTS, arguments.device)
    families = arguments.families
    if key not in arguments.peer_models:
        families = [family for family in families if family in ("ours", "adamw")]
    entries = []
    for group in contestants(model, families):
        of_group = [Entry(contestant, gradients, clock) for contestant in group]
        race(of_group, arguments.rounds, arguments.seconds)
        entries += of_group
    times_table(report, model, entries)
    shares_table(report, model, entries, rates, gradients)
    check_targets(report, key, entries)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--peer-models", nargs="*", default=["llama-103m"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of one optimizer on one model, about"
    )
    parser.add_argument("--save", type=Path, help="write the tables to this file")
    parser.add_argument(
        "--tiny", action="store_true", help="small models: shows that all of it runs"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    is_cuda = arguments.device != "cpu"
    report = Report(f"Steps on {torch.cuda.get_device_name() if is_cuda else 'a CPU'}")
    rates = Rates.measure(Clock(arguments.device, arguments.rounds))
    report.write(
        f"Measured in this run: memory {rates.memory:.0f} GB/s (a copy); products of order 8192 in "
        f"fp16 {rates.fp16:.3g}, TF32 {rates.tf32:.3g}, float32 {rates.float32:.3g} TFLOP/s."
    )
    models = TINY_MODELS if arguments.tiny else MODELS
    for key in arguments.models:
        measure(report, key, models[key], arguments, rates)
    missed = report.finish(arguments.save)
    return 0 if arguments.tiny else missed


if __name__ == "__main__":
    sys.exit(main())
