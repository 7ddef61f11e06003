"""Shapes that matrices precondition, in Distributed Shampoo and in torchium."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor


def common_merge_dims(params: Sequence[tuple[str, Tensor]], block_size: int, target: Any) -> bool:
    """The ``merge_dims`` with which Shampoo has the shapes of Distributed Shampoo for all parameters.

    Raises ValueError, with the name of a parameter, if there is none.
    """
    wrong = _first_other(params, block_size, target, merge_dims=True)
    if wrong is None:
        return True
    if _first_other(params, block_size, target, merge_dims=False) is None:
        return False
    name, param = wrong
    theirs = list(their_dims(param.shape, block_size, target))
    merged, kept = (list(merged_dims(param.shape, block_size, merge)) for merge in (True, False))
    unmerged = "" if kept == merged else f" or, without merging, {kept}"
    raise ValueError(
        f"distributed_config.target_parameter_dimensionality={target} and max_preconditioner_dim="
        f"{block_size} make {theirs} of {name}, and torchium "
        f"{merged}{unmerged}; {_remedy(param.shape, block_size, target)}"
    )


def _first_other(
    params: Iterable[tuple[str, Tensor]], block_size: int, target: Any, merge_dims: bool
) -> tuple[str, Tensor] | None:
    for name, param in params:
        if not param.numel():
            continue
        shape = tuple(param.shape)
        if their_dims(shape, block_size, target) != merged_dims(shape, block_size, merge_dims):
            return name, param
    return None


def _remedy(shape: Sequence[int], block_size: int, target: Any) -> str:
    needed = math.prod(shape[1:])
    if their_dims(shape, block_size, 2) == merged_dims(shape, block_size, True):
        return f"use {_config(2)}"
    if their_dims(shape, needed, 2) == merged_dims(shape, needed, True):
        return f"use {_config(2)} and max_preconditioner_dim of at least {needed}"
    return "use torchium.Shampoo, and compare its report() with what you expect"


def _config(target: int) -> str:
    return (
        "distributed_config=SingleDeviceDistributedConfig("
        f"target_parameter_dimensionality={target})"
    )


def their_dims(shape: Sequence[int], limit: int, target: Any) -> tuple[int, ...]:
    """Dimensions in Distributed Shampoo: merged from the last backwards, down to ``target``."""
    if target == math.inf:
        return tuple(shape)
    return _merged(shape, lambda groups, left: groups + left > target, limit)


def merged_dims(shape: Sequence[int], block_size: int, merge_dims: bool) -> tuple[int, ...]:
    """Dimensions in torchium (``src/optim/blocked/blocking.h``)."""
    if merge_dims and len(shape) == 4:
        shape = (shape[0], math.prod(shape[1:]))
    return _merged(shape, lambda groups, left: merge_dims and groups + left > 2, block_size)


def _merged(
    shape: Sequence[int], merges: Callable[[int, int], bool], limit: int
) -> tuple[int, ...]:
    """Drops unit dimensions, then joins neighbours up to ``limit`` while ``merges``.

    ``merges`` is asked with the dimensions so far, and those that are left.
    """
    dims = [dim for dim in reversed(shape) if dim != 1] or [1]
    merged = dims[:1]
    for done, dim in enumerate(dims[1:], start=1):
        if merges(len(merged), len(dims) - done) and merged[-1] * dim <= limit:
            merged[-1] *= dim
        else:
            merged.append(dim)
    return tuple(reversed(merged))
