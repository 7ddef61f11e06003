"""Matrix powers and the schedule on which they are renewed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Eigenvalues below n * FLOOR of the largest are hidden by rounding errors in float64.
FLOOR = torch.finfo(torch.float64).eps


def damped_power(A: Tensor, exponent: float, eps: float = 0.0, relative_eps: float = 0.0) -> Tensor:
    """(A + (eps + relative_eps * s) I)^exponent, s the largest eigenvalue of the symmetric A.

    For a negative exponent, eigenvalues below the floor count as the floor.
    """
    n = A.shape[-1]
    eigenvalues, Q = torch.linalg.eigh((A + A.T) / 2)
    s = eigenvalues.max().clamp(min=0)
    damped = eigenvalues + eps + relative_eps * s
    floor = torch.clamp(n * FLOOR * damped.max(), min=torch.finfo(torch.float64).tiny)
    damped = torch.maximum(damped, floor if exponent < 0 else torch.zeros_like(floor))
    return (Q * damped**exponent) @ Q.T


def root_is_due(step: int, update_freq: int, start: int = 1) -> bool:
    """Whether the `step`-th step of a parameter (from 1) renews its roots."""
    if step <= start:
        return step == start
    octave = 2 ** math.floor(math.log2(step))
    interval = max(1, octave // 4)
    return step % update_freq == 0 or (interval < update_freq and step % interval == 0)
