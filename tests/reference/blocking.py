"""How a parameter is viewed as a tensor of fewer dimensions and cut into blocks.

Anil et al. 2020 (arXiv 2002.09018), section 4.3; Shi et al. 2023 (arXiv 2309.06497), section 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence


def preconditioned_shape(
    shape: Sequence[int], block_size: int, merge_dims: bool, target_order: int | None = None
) -> list[int]:
    """The shape that is preconditioned: unit dimensions gone, small dimensions merged.

    Its length is the order k of the parameter.
    """
    shape = list(shape)
    if target_order == 0:
        return shape
    if target_order is not None:
        return _merged_down_to(target_order, [n for n in shape if n != 1] or [1], block_size)
    if merge_dims and len(shape) == 4:  # a convolution: [out, in * kh * kw]
        shape = [shape[0], math.prod(shape[1:])]
    shape = [n for n in shape if n != 1]
    if not merge_dims or len(shape) <= 2:
        return shape

    merged = [shape[-1]]
    for i in reversed(range(len(shape) - 1)):
        would_become_a_vector = i == 0 and len(merged) == 1
        if shape[i] * merged[0] <= block_size and not would_become_a_vector:
            merged[0] *= shape[i]
        else:
            merged.insert(0, shape[i])
    return merged


def _merged_down_to(order: int, shape: list[int], block_size: int) -> list[int]:
    """Merges pairs, each time the last one that fits; a pair that does not fit is never asked again."""
    last = len(shape) - 1
    while last > 0 and len(shape) > order:
        if shape[last - 1] * shape[last] <= block_size:
            shape[last - 1 : last + 1] = [shape[last - 1] * shape[last]]
        last -= 1
    return shape


def blocks_of(shape: Sequence[int], block_size: int) -> Iterator[tuple[slice, ...]]:
    """Index tuples of all blocks: pieces of `block_size` and a remainder in every dimension.

    A 0-dimensional shape has one block, the empty index.
    """
    pieces = [[slice(a, min(a + block_size, n)) for a in range(0, n, block_size)] for n in shape]
    return itertools.product(*pieces)
