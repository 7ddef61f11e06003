"""Times and memory of a device, and the rates that bound them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LONG = 0.25  # seconds: longer calls are timed once


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Clock:
    """Times and memory of one device; on a CPU (dry run), times only."""

    device: str
    rounds: int = 1

    def once(self, function: Callable[[], object]) -> float:
        """Seconds."""
        start = self.mark()
        function()
        end = self.mark()
        if self.device != "cpu":
            end.synchronize()
        return 1e-3 * self.between(start, end)

    def mark(self) -> Any:
        """An event on the stream; nothing waits for it until a distance is read."""
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Milliseconds; the device must have passed both."""
        return 1e3 * (end - start) if self.device == "cpu" else start.elapsed_time(end)

    def seconds(self, function: Callable[[], object]) -> float:
        """The median over rounds; the first call warms up."""
        rounds = 1 if self.once(function) > LONG else self.rounds
        return statistics.median(self.once(function) for _ in range(rounds))

    def workspace(self, function: Callable[[], Tensor]) -> tuple[Tensor, float | None]:
        """The result, and the peak bytes in addition to it."""
        if self.device == "cpu":
            return function(), None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        return result, torch.cuda.max_memory_allocated() - before - result.nbytes


@dataclass
class Roofs:
    peak: float  # TFLOP/s of a large fp16 product on random data
    memory: float  # GB/s of a copy

    @classmethod
    def measure(cls, clock: Clock) -> Roofs:
        n = 8192 if clock.device != "cpu" else 256
        A, B, C = (torch.randn(n, n, device=clock.device).half() for _ in range(3))
        product = clock.seconds(lambda: torch.mm(A, B, out=C))
        elements = 16 * n**2
        source, target = (torch.zeros(elements, device=clock.device) for _ in range(2))
        copy = clock.seconds(lambda: target.copy_(source))
        return cls(2 * n**3 / product * 1e-12, 2 * source.nbytes / copy * 1e-9)
