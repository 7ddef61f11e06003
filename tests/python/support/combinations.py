"""Combinations of settings for `pytest.mark.parametrize`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch


def in_turn(
    first: Iterable[Any], second: Iterable[Any], third: Sequence[Any]
) -> list[tuple[Any, Any, Any]]:
    """All pairs of the first two, each with one value of the third in turn; on a GPU all combinations.

    With at least as many values of the first and of the second as of the third, all pairs of values occur.
    """
    pairs = product(enumerate(first), enumerate(second))
    if torch.cuda.is_available():
        return [(a, b, c) for ((_, a), (_, b)), c in product(pairs, third)]
    return [(a, b, third[(i + j) % len(third)]) for (i, a), (j, b) in pairs]
