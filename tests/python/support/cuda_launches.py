"""Counts the launches of a step on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def launches_of(work: Callable[[], object]) -> int:
    """Kernels, copies and fills."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    return len(events)


def launches(optimizer: torch.optim.Optimizer) -> int:
    """Those of one step."""
    return launches_of(optimizer.step)
