"""The dimensions that matrices precondition in Distributed Shampoo."""

from __future__ import annotations

import math
from collections.abc import Sequence


def their_dims(shape: Sequence[int], limit: int, target: float) -> tuple[int, ...]:
    """Dimensions of a parameter with elements; in Shampoo those of ``target_order`` (infinity: 0).

    Unit dimensions are dropped, and neighbours merge, from the last backwards, while their product is at most
    ``limit`` and more than ``target`` are left.
    """
    if target == math.inf:
        return tuple(shape)
    dims = [dim for dim in reversed(shape) if dim != 1] or [1]
    merged = dims[:1]
    for done, dim in enumerate(dims[1:], start=1):
        if len(merged) + len(dims) - done > target and merged[-1] * dim <= limit:
            merged[-1] *= dim
        else:
            merged.append(dim)
    return tuple(reversed(merged))
