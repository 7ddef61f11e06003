"""The plans of the core (``src/optim/core/step_plan.h``), and what they are bound to.

The plans of the core serve all groups of an optimizer. They read the gradients of their parameters
themselves, and notice when one of them is not what it was. Which objects the groups and the state hold,
Python alone knows: :class:`Snapshot`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .amp import on_device
from .options import lr_tensor
from .parameters import State, parameter_names

# Skipped steps in a row after which the optimizer raises.
MAX_CONSECUTIVE_SKIPS = 3
JOINT = -1  # instead of a group: all of them


@dataclass(frozen=True)
class Report:
    """What steps of the parameters of one group (or of all) on one device have come to."""

    group: int
    consecutive_skips: int
    non_finite: Tensor | None  # the first parameter whose gradient skipped the last of them
    root_failures: int  # the largest number of failures in a row of one matrix
    failed: Tensor | None  # the parameter of that matrix


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


class JointPlan:
    """The plan of all groups of an optimizer that sees layers at work."""

    def __init__(self, name: str) -> None:
        self.core = getattr(torch.classes.torchium, name)()
        self.params: list[Tensor] = []
        self.positions: dict[Tensor, int] = {}

    def bind(self, groups: list[dict[str, Any]], states: dict[Any, State]) -> None:
        self.params = [p for group in groups for p in group["params"]]
        self.positions = {p: i for i, p in enumerate(self.params)}
        own = [states.get(p, {}) for p in self.params]
        self.core.bind(
            self.params,
            [
                {k: v for k, v in s.items() if isinstance(v, Tensor) and isinstance(k, str)}
                if "step" in s
                else {}
                for s in own
            ],
            [index for index, group in enumerate(groups) for _ in group["params"]],
            [name for index, group in enumerate(groups) for name in parameter_names(index, group)],
        )

    def step(
        self, lrs: list[Any], found_inf: Tensor | None, loss_scale: Tensor | None
    ) -> list[tuple[int, str, Tensor | None]]:
        """The step that ``prepare()`` has planned, and what it changes in the state besides values."""
        if not self.params:
            return []
        device = self.params[0].device
        if found_inf is not None:
            found_inf = on_device(found_inf, device)
        rates = tuple(lr_tensor(lr, device) if isinstance(lr, Tensor) else lr for lr in lrs)
        changes: list[tuple[int, str, Tensor | None]] = self.core.step(rates, found_inf, loss_scale)
        return changes

    def failures(self, wait: bool) -> list[Report]:
        """Skipped steps and failed roots, oldest first; all of them after a wait."""
        if wait:
            self.core.request_report()
        reports = []
        while (failure := self.core.next_failure(wait)) is not None:
            reports.append(Report(JOINT, *failure[1:]))
        return reports
