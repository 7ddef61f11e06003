"""What a device can do at most, measured on the spot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDS = 5


@dataclass(frozen=True)
class Limits:
    """Rates of a device.

    Attributes:
        bandwidth: bytes per second of a copy, read and written.
        flops: floating point operations per second of a square matrix product: in bfloat16 on a CUDA
            device, in float32 on a CPU.
    """

    bandwidth: float
    flops: float


def _best(function: Callable[[], object], on_cuda: bool) -> float:
    """Seconds of the fastest of some calls after a first one."""
    fastest = float("inf")
    for call in range(ROUNDS + 1):
        if on_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if on_cuda:
            torch.cuda.synchronize()
        if call > 0:
            fastest = min(fastest, time.perf_counter() - start)
    return fastest


@torch.no_grad()
def measure_limits(device: torch.device) -> Limits:
    """Takes about 50 ms, and 1 GiB of a CUDA device or 128 MiB of the host, for a moment."""
    on_cuda = device.type == "cuda"
    source = torch.ones(2**27 if on_cuda else 2**24, device=device)
    target = torch.empty_like(source)
    copy = _best(lambda: target.copy_(source), on_cuda)
    n, dtype = (8192, torch.bfloat16) if on_cuda else (1024, torch.float32)
    A = torch.ones(n, n, device=device, dtype=dtype)
    product = torch.empty_like(A)
    seconds = _best(lambda: torch.mm(A, A, out=product), on_cuda)
    return Limits(2 * source.nbytes / copy, 2 * n**3 / seconds)
