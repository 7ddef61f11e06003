"""The plans of the core (``src/optim/core/step_plan.h``): what an optimizer keeps beside groups and state.

A plan serves one parameter group on one device. It is bound to parameters and their state, reads their
gradients itself, and says when one of them is not what it was. Which objects the groups and the state
hold, Python alone knows: :class:`Snapshot`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .amp import on_device
from .monitor import Report, refuse_capture
from .options import lr_tensor
from .parameters import State


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


class GroupPlan:
    """The plan of one group on one device."""

    def __init__(self, name: str, index: int, device: torch.device) -> None:
        refuse_capture(device, "it is the first one; run a step before the capture")
        self.index = index
        self.device = device
        self._core = getattr(torch.classes.torchium, name)(device)
        self._params: list[Tensor] = []
        self._states: list[State] = []
        # Looked up once: each runs in every step.
        self.prepare = self._core.prepare
        self._step = self._core.step
        self._next_failure = self._core.next_failure

    def bind(self, params: list[Tensor], states: list[State], counts: dict[Tensor, int]) -> None:
        """Parameters in the order of the group, their state or {}, and known step counts."""
        self._params, self._states = params, states
        self._core.bind(params, states, [counts.get(p, -1) for p in params])

    def set_options(self, options: dict[str, Any]) -> None:
        self._core.set_options(tuple(chain.from_iterable(options.items())))

    def step(self, lr: float | Tensor, found_inf: Tensor | None) -> None:
        """The step that ``prepare()`` has planned; returns before a GPU is done."""
        if found_inf is not None:
            found_inf = on_device(found_inf, self.device)
        if isinstance(lr, Tensor):
            self._step(0.0, lr_tensor(lr, self.device), found_inf)
        else:
            self._step(lr, None, found_inf)

    def update_preconditioners(self) -> None:
        self._core.update_preconditioners()

    def graphs(self) -> tuple[int, int]:
        """How many graphs of steps are kept, and the bytes of scratch memory that they hold."""
        return self._core.graph_count(), self._core.graph_bytes()

    def counts(self, states: dict[Tensor, State]) -> dict[Tensor, int]:
        """Steps that parameters have taken, where the host knows and ``states`` has that count."""
        known = zip(self._params, self._states, self._core.host_steps(), strict=True)
        return {
            param: count
            for param, state, count in known
            if count >= 0 and state.get("step") is states.get(param, {}).get("step")
        }

    def failures(self, wait: bool) -> list[Report]:
        """Skipped steps and failed roots that are known, oldest first; all of them after a wait."""
        if wait:
            self._core.request_report()
        reports = []
        while (failure := self._next_failure(wait)) is not None:
            reports.append(Report(self.index, [], False, *failure))
        return reports
