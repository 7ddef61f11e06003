"""The cost of a step's parts: kernels by the range of the step that launched them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# The ranges that a step of Shampoo marks with RECORD_FUNCTION("torchium::..."), and the rest.
SHARES = ("statistics", "roots", "precondition", "elementwise", "other")
PREFIX = "torchium::"
STEP = "benchmark::step"

CALLS = ("cuda_runtime", "cuda_driver")
LAUNCHES = ("Launch", "Memcpy", "Memset")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")

Trace = Sequence[dict[str, Any]]  # events of a Chrome trace


@dataclass
class StepProfile:
    """One step; without a CUDA device the milliseconds are the CPU's, and there are no launches."""

    calls: int = 0  # launches, copies and fills by the host; a graph is one
    kernels: int = 0  # that run on the device
    ms: Counter[str] = field(default_factory=Counter)
    launched: Counter[str] = field(default_factory=Counter)  # kernels

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())


@dataclass(frozen=True)
class Range:
    name: str
    start: float
    end: float

    @classmethod
    def of(cls, event: dict[str, Any]) -> Range:
        return cls(event["name"], event["ts"], event["ts"] + event["dur"])

    def holds(self, time: float) -> bool:
        return self.start <= time <= self.end


def share_of(ranges: list[Range], time: float) -> str:
    """The innermost range of the step at a given time."""
    holding = [r for r in ranges if r.holds(time)]
    if not holding:
        return "other"
    return min(holding, key=lambda r: r.end - r.start).name.removeprefix(PREFIX)


def parse(trace: Trace) -> StepProfile:
    """The events within the range called STEP."""
    complete = [event for event in trace if event.get("ph") == "X"]
    on_host = [event for event in complete if event.get("cat") in ("cpu_op", "user_annotation")]
    step = next(Range.of(event) for event in on_host if event["name"] == STEP)
    marked = {PREFIX + share: share for share in SHARES}
    ranges = [Range.of(event) for event in on_host if event["name"] in marked]
    found = StepProfile()
    asked: dict[int, float] = {}  # time of the host's call, by correlation
    for event in complete:
        if event.get("cat") in CALLS and any(word in event["name"] for word in LAUNCHES):
            asked[event["args"]["correlation"]] = event["ts"]
            found.calls += step.holds(event["ts"])
    for event in complete:
        time = asked.get(event.get("args", {}).get("correlation"))
        if event.get("cat") not in KERNELS or time is None or not step.holds(time):
            continue
        share = share_of(ranges, time)
        found.kernels += 1
        found.launched[share] += 1
        found.ms[share] += 1e-3 * event["dur"]
    if not asked:
        for r in ranges:
            found.ms[marked[r.name]] += 1e-3 * (r.end - r.start)
        found.ms["other"] = max(0.0, 1e-3 * (step.end - step.start) - found.total_ms)
    return found


def profiled(step: Callable[[], object], is_cuda: bool) -> StepProfile:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    if is_cuda:
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        with record_function(STEP):
            step()
        if is_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return parse(json.loads(path.read_text())["traceEvents"])
