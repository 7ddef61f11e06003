"""Base of the optimizers whose state is matrices of blocks: Shampoo and full-matrix Adagrad.

Their plans (``src/optim/blocked/blocked_plans.h``) check, create and convert the state; Python keeps it. The
matrices of a group are views of common buffers. Which parameters have state determines their layout, so a
resumed run continues bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._sharded import is_dtensor
from .._core.amp import unscaled_gradients
from .._core.base import CoreOptimizer
from .._core.checkpoint import as_tensors, own_state
from .._core.parameters import State, parameter_names
from .._core.plan import Report, Snapshot, failures
from .._core.process_groups import group_named
from .shards import Numbers, Shards, group_of
from .sharing import Sharing, warn_of_repeated_work
from .state_shares import StateShare, loaded_share

# Options, parameters, names (or none), states and shardings of all groups, as the plans take them.
Groups = tuple[
    tuple[Any, ...], list[list[Tensor]], list[list[str]], list[list[State]], list[list[Numbers]]
]


class BlockedOptimizer(CoreOptimizer):
    """Base of the optimizers that keep the matrices of a group in block storage."""

    # A GradScaler then leaves the decision to skip to step(), which does not wait for the device.
    _step_supports_amp_scaling = True

    # Set before the constructor runs by optimizers that can share their step.
    _sharing = Sharing.none()
    _loaded_shares: set[Tensor]  # parameters whose shares load_state_dict() has loaded

    _plans: Any  # torch.classes.torchium.BlockedPlans
    # What the plans are bound to, and the options that they have, by group.
    _bound_to: Snapshot | None
    _adopted: dict[int, tuple[Any, ...]]

    def _groups(self) -> Groups:
        groups = self.param_groups
        self._recognise_shards()
        return (
            tuple(self._OPTIONS.values(group) for group in groups),
            [[self._shards.of(p) for p in group["params"]] for group in groups],
            [group.get("param_names", []) for group in groups],
            [
                [own_state(self.state[p]) if self._has_state(p) else {} for p in group["params"]]
                for group in groups
            ],
            [self._shardings(index, group) for index, group in enumerate(groups)],
        )

    def _recognise_shards(self) -> None:
        """Shares the steps among the ranks of the meshes on which DTensor parameters lie."""
        if self._can_share and not self._sharing.group_name:
            group = group_of(self.param_groups)
            if group is not None:
                self._sharing = self._sharing._replace(group_name=group.group_name)
                self._forget_derived()

    def _shardings(self, index: int, group: dict[str, Any]) -> list[Numbers]:
        params = group["params"]
        if not any(map(is_dtensor, params)):
            return [[] for _ in params]
        ranks = group_named(self._sharing.group_name)
        return [
            self._shards.numbers_of(p, ranks, name) if is_dtensor(p) else []
            for p, name in zip(params, parameter_names(index, group), strict=True)
        ]

    # ---- the step

    def _step_groups(self) -> None:
        reaches_plan = False  # which agrees with other ranks
        try:
            self._shards.take_gradients()
            if not (self._is_bound() and self._prepare()):
                self._bind()
                if not self._prepare():
                    raise RuntimeError("parameters, gradients or state changed during step()")
            lrs = [group["lr"] for group in self.param_groups]
            tensors: list[Tensor] = []
            if any([isinstance(lr, Tensor) for lr in lrs]):
                tensors = [
                    torch.as_tensor(lr, dtype=getattr(lr, "dtype", torch.float64)) for lr in lrs
                ]
                lrs = []
            with unscaled_gradients(self) as found_inf:
                reaches_plan = True
                self._step_plans(lrs, tensors, found_inf)
        except BaseException:
            if not reaches_plan:
                self._withdraw()
            raise
        self._shards.end_step()

    def _withdraw(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        if params:
            self._plans.withdraw(params[0].device)

    # Runs in every step for all parameters of a model: no call per parameter.
    def _is_bound(self) -> bool:
        """Whether the plans are bound to the current groups and state; passes changed options on."""
        if self._bound_to is None:
            return False
        if not self._bound_to.is_of(self.param_groups, self.state):
            return False
        return all([self._adopt_options(i, group) for i, group in enumerate(self.param_groups)])

    def _adopt_options(self, index: int, group: dict[str, Any]) -> bool:
        """Passes on options set since the last step; False if the state has to follow them."""
        self._check_changed_options(index, group)
        checked = self._checked_options[index]
        if self._adopted.get(index) is not checked:
            self._adopted[index] = checked
            return bool(self._plans.set_options(index, self._OPTIONS.values(group)))
        return True

    def _bind(self, *, all_with_state: bool = False) -> None:
        """Creates and converts the state that the next call needs, and binds the plans to it.

        That is the state of the parameters with a gradient, or of all parameters that have state.
        """
        self._recognise_shards()
        if self._can_share and not self._sharing.group_name and self._bound_to is None:
            warn_of_repeated_work(type(self).__name__)
        self._bound_to = None  # until all is done
        for index, group in enumerate(self.param_groups):
            self._check_changed_options(index, group)
        self._check_unsharded()
        groups = self._groups()
        self._shards.take_gradients()
        changed = self._plans.bind(*groups, all_with_state)
        for group, old_states, states in zip(self.param_groups, groups[3], changed, strict=True):
            for param, old, new in zip(group["params"], old_states, states, strict=True):
                if new:
                    state = self.state[param]
                    for key in old.keys() - new.keys():
                        del state[key]
                    state.update(new)
        self._adopted = dict(self._checked_options)
        self._bound_to = Snapshot(self.param_groups, self.state)

    def _renew_roots(self) -> None:
        self._raise_failures()
        if not (self._is_bound() and self._plans.has_all_states()):
            self._bind(all_with_state=True)
        self._plans.update_preconditioners()
        self._raise_failures()

    def _take_reports(self, wait: bool) -> list[Report]:
        if wait:
            self._plans.request_reports()
        return [
            report._replace(
                non_finite=self._shards.param_of(report.non_finite),
                failed=self._shards.param_of(report.failed),
            )
            for report in failures(self._next_failure, wait)
        ]

    def _memory(self) -> tuple[Any, ...]:
        memory: tuple[Any, ...] = self._plans.memory_report(*self._groups())
        return memory

    # ---- state

    def _owners(self) -> list[tuple[Tensor, list[int]]]:
        """The ranks that own the blocks of each parameter, as far as they are known."""
        params = [p for group in self.param_groups for p in group["params"]]
        owners = [(p, self._plans.owners(self._shards.of(p))) for p in params]
        return [(p, of_blocks) for p, of_blocks in owners if of_blocks]

    def _give_owners(self, owners: list[tuple[Tensor, list[int]]]) -> None:
        for param, of_blocks in owners:
            self._plans.give_owners(self._shards.of(param), of_blocks)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sharing": self._sharing, "_owners": self._owners()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = state.copy()
        owners = state.pop("_owners", [])
        super().__setstate__(state)
        self._give_owners(owners)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        owners = self._owners()
        self._loaded_shares = set()
        super().load_state_dict(state_dict)
        self._give_owners([(p, ranks) for p, ranks in owners if p in self._loaded_shares])

    def _remember_options(self) -> None:
        for group in self.param_groups:
            params = [self._shards.of(p) for p in group["params"] if self._has_state(p)]
            try:
                self._plans.remember(self._OPTIONS.values(group), params)
            except (KeyError, ValueError):  # of a copy: the next step raises it
                return

    def _loaded_state(
        self, index: int, group: dict[str, Any], saved: dict[Tensor, dict[str, Any]]
    ) -> dict[Tensor, State]:
        self._recognise_shards()
        params, names = group["params"], parameter_names(index, group)
        states = [as_tensors(saved.get(p, {}), n) for p, n in zip(params, names, strict=True)]
        shards = [self._shards.of(p) for p in params]
        shares: dict[Tensor, State] = {}
        for i, param in enumerate(params):
            if any(isinstance(value, StateShare) for value in states[i].values()):
                shares[param] = loaded_share(
                    names[i],
                    states[i],
                    own_state(self.state[param]) if self._has_state(param) else {},
                    self._plans.owners(shards[i]),
                )
                states[i] = {}
        loaded = self._plans.load(
            index,
            self._OPTIONS.values(group),
            shards,
            group.get("param_names", []),
            states,
            self._shardings(index, group),
        )
        self._loaded_shares.update(shares)
        return {**{p: s for p, s in zip(params, loaded, strict=True) if s}, **shares}

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._plans = torch.classes.torchium.BlockedPlans(self._OPTIONS.optimizer, *self._sharing)
        self._shards = Shards()
        # Looked up once: each runs in every step.
        self._prepare = self._plans.prepare
        self._step_plans = self._plans.step
        self._next_failure = self._plans.next_failure
        self._bound_to = None
        self._adopted = {}
