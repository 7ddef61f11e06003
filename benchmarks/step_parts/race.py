"""Optimizers that step the same parameters with the same gradients in turns, and their step times."""

from __future__ import annotations

import gc
import random
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from shared.device_clock import Clock

from step_parts.contestants import Contestant, Steps
from step_parts.profile import StepProfile, profiled
from step_parts.shapes import Gradients

WARM_UP = 10
STEPS_PER_ROUND = 5  # for optimizers whose steps all cost the same
LEAST_ROUNDS = 3  # the median of fewer is that of an accident


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
    """One optimizer with one model."""

    contestant: Contestant
    gradients: Gradients
    clock: Clock
    optimizer: Steps | None = None
    count: int = 0
    rounds: list[list[float]] = field(default_factory=list)  # ms of each step of a cycle
    spent: float = 0.0  # seconds
    state: float | None = None  # bytes in addition to parameters and gradients
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
        """Record its time. An error ends its race and is shown in its row."""
        start = time.monotonic()
        try:
            with tf32(self.contestant.tf32):
                yield
                if self.is_cuda:
                    torch.cuda.synchronize()
        except Exception as error:  # any error of a peer belongs in the table
            place = traceback.extract_tb(error.__traceback__)[-1]
            lines = [*str(error).strip().splitlines(), f"in {Path(place.filename).name}"]
            self.note = f"{type(error).__name__}: {lines[0]}"[:120]
            self.optimizer = None
        self.spent += time.monotonic() - start

    def prepare(self, most_seconds: float) -> None:
        """Construct it, warm it up, and measure its memory."""
        if self.is_cuda:
            gc.collect()
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
        """A cycle of steps, without waiting between them."""
        cycle = self.contestant.cycle
        marks = []
        with self.turn():
            for _ in range(cycle if cycle > 1 else STEPS_PER_ROUND):
                self.feed()
                start = self.clock.mark()
                self.step()
                marks.append((start, self.clock.mark()))
        if self.optimizer is not None:
            self.rounds.append([self.clock.between(*pair) for pair in marks])

    def profile(self) -> None:
        """Profile a step with roots, if only some have them, and one without."""
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
        """The step of a cycle with roots: the longest."""
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


def race(entries: list[Entry], rounds: int, most_seconds: float) -> None:
    """All take turns, in a different order every round; slow ones run fewer rounds."""
    shuffle = random.Random(0).sample
    for entry in entries:
        entry.prepare(most_seconds)
    for r in range(rounds):
        for entry in shuffle(entries, len(entries)):
            limit = LEAST_ROUNDS * most_seconds if r < LEAST_ROUNDS else most_seconds
            if entry.optimizer is not None and (r == 0 or entry.spent < limit):
                entry.round()
    for entry in entries:
        if entry.optimizer is not None and entry.spent < 2 * most_seconds:
            entry.profile()
        entry.optimizer = None  # and its memory
