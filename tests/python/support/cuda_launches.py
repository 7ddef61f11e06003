"""What a piece of work launches on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def kernels_of(work: Callable[[], object]) -> list[str]:
    """Names of the kernels, copies and fills."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type.name == "CUDA"]


def launches_of(work: Callable[[], object]) -> int:
    return len(kernels_of(work))


def launches(optimizer: torch.optim.Optimizer) -> int:
    """Those of one step."""
    return launches_of(optimizer.step)
