"""The plans of the core (``src/optim/core/step_plan.h``), and what they are bound to.

Plans read the gradients of their parameters themselves and notice when a tensor has changed. Only Python
knows which objects the groups and the state hold: :class:`Snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .parameters import State, parameter_names


class Report(NamedTuple):
    """The failures in steps of one group on one device (group 0 for a joint plan)."""

    group: int
    consecutive_skips: int
    non_finite: Tensor | None  # the first parameter whose gradient caused the last skip
    root_failures: int  # consecutive, of one matrix: the largest number
    failed: Tensor | None  # the parameter of that matrix


def failures(next_failure: Callable[[bool], Any], wait: bool) -> list[Report]:
    """Skipped steps and failed roots, oldest first; all of them after a wait."""
    reports = []
    while (failure := next_failure(wait)) is not None:
        reports.append(Report(*failure))
    return reports


class Snapshot:
    """The parameters of all groups and the tensors of their state, by identity."""

    def __init__(self, groups: list[dict[str, Any]], state: dict[Any, Any]) -> None:
        self._sizes, objects = _held(groups, state)
        self._objects = [*objects]

    def is_of(self, groups: list[dict[str, Any]], state: dict[Any, Any]) -> bool:
        sizes, objects = _held(groups, state)
        return sizes == self._sizes and all(map(is_, self._objects, objects))


# Runs in every step: allocates no list of all objects, and too few others to trigger garbage collection.
def _held(groups: list[dict[str, Any]], state: dict[Any, Any]) -> tuple[list[int], Iterator[Any]]:
    params = [group["params"] for group in groups]
    # Other code may keep anything besides the state of parameters.
    states = [s for s in state.values() if isinstance(s, dict)]
    tensors = chain.from_iterable(map(dict.values, states))
    sizes = [*map(len, params), len(state), sum(map(len, states))]
    return sizes, chain(chain.from_iterable(params), state, tensors)


class JointPlan:
    """The plan for all groups of an optimizer that records layer calls."""

    def __init__(self, name: str, optimizer: str, process_group: str) -> None:
        self.core = getattr(torch.classes.torchium, name)(optimizer, process_group)
        self.params: list[Tensor] = []
        self.positions: dict[Tensor, int] = {}

    def bind(self, groups: list[dict[str, Any]], states: dict[Any, State]) -> None:
        self.params = [p for group in groups for p in group["params"]]
        self.positions = {p: i for i, p in enumerate(self.params)}
        self.core.bind(
            self.params,
            [state_of(p, states) for p in self.params],
            _groups_of_params(groups),
            [name for index, group in enumerate(groups) for name in parameter_names(index, group)],
        )

    def memory(
        self, groups: list[dict[str, Any]], states: dict[Any, State], names: dict[Tensor, str]
    ) -> tuple[Any, ...]:
        """The memory of these groups and states, and of the plan; ``names``: of all parameters."""
        params = [*names]
        memory: tuple[Any, ...] = self.core.memory_report(
            params,
            [state_of(p, states) for p in params],
            _groups_of_params(groups),
            [*names.values()],
            len(groups),
        )
        return memory

    def step(
        self, lrs: list[Any], found_inf: Tensor | None, loss_scale: Tensor | None
    ) -> list[tuple[int, str, Tensor | None]]:
        """The step planned by ``prepare()``. Returns changes of the state other than of values."""
        if not self.params:
            return []
        changes: list[tuple[int, str, Tensor | None]] = self.core.step(
            tuple(lrs), found_inf, loss_scale
        )
        return changes


def state_of(param: Tensor, states: dict[Any, State]) -> State:
    """The state of a parameter without what other code keeps there."""
    state = states.get(param, {})
    if "step" not in state:
        return {}
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and isinstance(k, str)}


def _groups_of_params(groups: list[dict[str, Any]]) -> list[int]:
    return [index for index, group in enumerate(groups) for _ in group["params"]]
