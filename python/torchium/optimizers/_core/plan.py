"""What the plans of the core (``src/optim/blocked/blocked_plans.h``) are bound to.

A plan reads the gradients of its parameters itself, and notices when one of them is not what it was. Which
objects the groups and the state hold, Python alone knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any


class Snapshot:
    """The parameters of all groups and the tensors of their state, by identity."""

    def __init__(self, groups: list[dict[str, Any]], state: dict[Any, Any]) -> None:
        self._sizes, objects = _held(groups, state)
        self._objects = [*objects]

    def is_of(self, groups: list[dict[str, Any]], state: dict[Any, Any]) -> bool:
        sizes, objects = _held(groups, state)
        return sizes == self._sizes and all(map(is_, self._objects, objects))


# Runs in every step: makes no list of all objects, nor enough others to start a garbage collection.
def _held(groups: list[dict[str, Any]], state: dict[Any, Any]) -> tuple[list[int], Iterator[Any]]:
    params = [group["params"] for group in groups]
    # Other code may keep anything beside the state of parameters.
    states = [s for s in state.values() if isinstance(s, dict)]
    tensors = chain.from_iterable(map(dict.values, states))
    sizes = [*map(len, params), len(state), sum(map(len, states))]
    return sizes, chain(chain.from_iterable(params), state, tensors)
