"""Optimizers whose state is batches of matrices: Shampoo, full-matrix Adagrad.

The matrices of the parameters of a group are views of storage (``src/optim/blocked/block_storage.h``); a buffer is a
memory layout only, and a function of the set of parameters of its group that have state, so that a
resumed run continues bit for bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Set
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from .amp import unscale_gradients
from .base import CoreOptimizer, StepArguments
from .checkpoint import OptionalState, fill_state
from .monitor import Key, Report, refuse_capture
from .parameters import (
    STEP_DTYPE,
    State,
    check_unsharded,
    is_out_of_memory,
    parameter_name,
    state_dtype,
    state_zeros,
)
from .plan import GroupPlan, Snapshot

_MATRIX_KEYS = ("statistics", "roots", "root_failures")


@cache
def matrix_keys(slot: int) -> tuple[str, ...]:
    """State keys of one slot: the matrices of one mode of one block shape of a parameter."""
    return tuple(f"{key}.{slot}" for key in _MATRIX_KEYS)


class BlockedOptimizer(CoreOptimizer):
    """Base of the optimizers that keep the matrices of a group in storage."""

    # Options that the shapes of the state depend on.
    _LAYOUT_OPTIONS: ClassVar[tuple[str, ...]]
    # Keys of the state that is no matrix and always there, if it applies to the parameter.
    _ELEMENTWISE: ClassVar[tuple[str, ...]]
    # State of the parameter's shape that is made when an option first needs it.
    _BUFFERS: ClassVar[tuple[str, ...]] = ()
    # Of those with a bias correction: the key of the step count that it began with.
    _STARTS: ClassVar[dict[str, str]] = {}

    # A GradScaler then leaves the skip to step(), and so needs no wait for the device.
    _step_supports_amp_scaling = True

    # The class of its plans in the core.
    _PLAN: ClassVar[str]

    # Of each group on each device.
    _plans: dict[Key, GroupPlan]
    # What these are bound to, what state fits them, and the options that each group's have.
    _bound_to: Snapshot | None
    _bound_needs: dict[int, tuple[Any, ...]]
    _adopted: dict[int, tuple[Any, ...]]
    # Groups whose matrices are in storage.
    _stacked: set[int]
    # Of each parameter: what its state was last found right for (_fitting()).
    _found_right: dict[Tensor, tuple[Any, ...]]
    # Those whose state holds the same tensors since then.
    _checked: set[Tensor]

    # ---- what an optimizer defines

    @abstractmethod
    def _block_storage(
        self, params: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
        """Fresh storage of statistics, roots and failure counts, and their layout."""

    @abstractmethod
    def _elementwise_state(self, param: Tensor, group: dict[str, Any], has_matrices: bool) -> State:
        """Fresh state of the parameter's shape that is always there."""

    @abstractmethod
    def _needed_buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Those of ``_BUFFERS`` that a step with these options uses."""

    # ---- the step

    def _step_groups(self) -> None:
        if not self._plans_fit():
            self._make_plans()
        found_inf = unscale_gradients(self)
        for plan in self._plans.values():
            plan.step(self.param_groups[plan.index]["lr"], found_inf)

    # Runs in every step for all parameters of a model: no call a parameter.
    def _plans_fit(self) -> bool:
        """Plans the step of all groups, unless the plans are not those of what is there now."""
        return self._is_bound() and all([plan.prepare() for plan in self._plans.values()])

    def _is_bound(self) -> bool:
        """Whether the plans are bound to what the groups hold now; hands them changed options."""
        if self._bound_to is None:
            return False
        if not self._bound_to.is_of(self.param_groups, self.state):
            self._checked.clear()  # new tensors may have another dtype or device
            return False
        return all([self._adopt_options(i, group) for i, group in enumerate(self.param_groups)])

    def _adopt_options(self, index: int, group: dict[str, Any]) -> bool:
        """Hands the plans options that were set since the last step; False if state must follow."""
        self._check_changed_options(index, group)
        checked = self._checked_options[index]
        if self._adopted.get(index) is checked:
            return True
        if self._bound_needs.get(index) != self._needs(group):
            return False
        for plan in self._plans.values():
            if plan.index == index:
                plan.set_options({name: group[name] for name in self._CHECKS})
        self._adopted[index] = checked
        return True

    def _make_plans(self) -> None:
        """Checks all, creates the state that is missing, and plans the step of all groups."""
        steps = self._all_arguments()
        missing = [self._missing_state(step) for step in steps]
        counts = self._known_counts()
        self._add_state(steps, missing, counts)
        self._bind(counts)
        if not all([plan.prepare() for plan in self._plans.values()]):
            raise RuntimeError("parameters, gradients or state changed during step()")

    def _known_counts(self) -> dict[Tensor, int]:
        """Steps of parameters on GPUs, as far as the host knows them; a CPU has them at hand."""
        counts: dict[Tensor, int] = {}
        for plan in self._plans.values():
            if plan.device.type == "cuda":
                counts.update(plan.counts(self.state))
        return counts

    def _bind(self, counts: dict[Tensor, int], *, all_states: bool = False) -> None:
        """Binds the plans to the parameters and the state as they are.

        Unless ``all_states``, state that was not checked for these options is left out: a step of its
        parameter then comes back to :meth:`_make_plans`.
        """
        self._bound_to = None  # until all is done
        present = {p for group in self.param_groups for p in group["params"]}
        self._found_right = {p: fit for p, fit in self._found_right.items() if p in present}
        self._checked &= present
        plans: dict[Key, GroupPlan] = {}
        for index, group in enumerate(self.param_groups):
            needs = self._bound_needs[index] = self._needs(group)
            for device in sorted({p.device for p in group["params"]}, key=str):
                key = index, device
                plans[key] = self._plans.get(key) or GroupPlan(self._PLAN, index, device)
                params = [p for p in group["params"] if p.device == device]
                states = [
                    self._own_state(p)
                    if self._has_state(p) and (all_states or self._is_checked(p, needs))
                    else {}
                    for p in params
                ]
                plans[key].bind(params, states, counts)
        for key, plan in self._plans.items():
            if key not in plans and plan.index < len(self.param_groups):
                plan.bind([], [], {})  # may still have something to report
                plans[key] = plan
        self._plans = plans
        self._adopted = {}
        for index, group in enumerate(self.param_groups):
            self._adopt_options(index, group)
        self._bound_to = Snapshot(self.param_groups, self.state)

    def _take_reports(self, wait: bool) -> list[Report]:
        return [r for plan in self._plans.values() for r in plan.failures(wait)]

    def _missing_state(self, step: StepArguments) -> dict[Tensor, State]:
        """State that parameters of the step lack, or that must move for those to be stacked."""
        group, index = step.group, step.group_index
        needs = self._needs(group)
        changed = [p for p in step.params if not self._is_checked(p, needs)]
        if not changed and index in self._stacked:
            return {}
        old = {p: self._own_state(p) for p in group["params"] if self._has_state(p)}
        fits = self._check_old_state(index, group, old)
        state: dict[Tensor, State] = {}
        new = {p for p in changed if p not in old}
        if new or not fits or index not in self._stacked:
            for param in new:
                check_unsharded(param, parameter_name(index, group, param))
            params = [p for p in group["params"] if p in new or p in old]
            state = self._block_state(index, group, params, old)
        for key in self._needed_buffers(group):
            for param in changed:
                if key not in old.get(param, ()) or self._begins_afresh(key, param, group):
                    made = state.setdefault(param, {})
                    made[key] = state_zeros(param)
                    if param in old and key in self._STARTS:
                        made[self._STARTS[key]] = old[param]["step"].to(param.device, copy=True)
        if state:
            refuse_capture(step.device, "state has to be created; run a step before the capture")
        return state

    def _add_state(
        self,
        steps: list[StepArguments],
        missing: list[dict[Tensor, State]],
        counts: dict[Tensor, int],
    ) -> None:
        for step, states in zip(steps, missing, strict=True):
            for param, state in states.items():
                if not self._has_state(param):
                    counts[param] = 0
                self.state[param].update(state)
            needs = self._needs(step.group)
            # An average that no option needs would be of old gradients alone when one does again.
            unused = [key for key in self._STARTS if key not in self._needed_buffers(step.group)]
            for param in step.params:
                if self._is_checked(param, needs):
                    continue
                for key in unused:
                    self.state[param].pop(key, None)
                    self.state[param].pop(self._STARTS[key], None)
                self._found_right[param] = self._fitting(param, needs)
                self._checked.add(param)
            self._stacked.add(step.group_index)

    def _fit_old_state(self, index: int, group: dict[str, Any], params: list[Tensor]) -> None:
        """Makes the state of ``params`` fit them and the options; ValueError where it cannot."""
        needs = self._needs(group)
        if all(self._is_checked(p, needs) for p in params):
            return
        old = {p: self._own_state(p) for p in params}
        if not self._check_old_state(index, group, old):
            for param, state in self._block_state(index, group, params, old).items():
                self.state[param].update(state)

    def _needs(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """What state must fit beside its parameter."""
        return self._layout(group), self._needed_buffers(group)

    def _fitting(self, param: Tensor, needs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Changes when the state of the parameter may not be right any more."""
        return (*needs, param.shape, param.dtype, param.device, len(self.state.get(param, ())))

    def _is_checked(self, param: Tensor, needs: tuple[Any, ...]) -> bool:
        """Whether the state of the parameter was found right for these needs, and is as it was."""
        return param in self._checked and self._found_right[param] == self._fitting(param, needs)

    def _check_old_state(self, index: int, group: dict[str, Any], old: dict[Tensor, State]) -> bool:
        """Whether the state of parameters has their device and dtype.

        Raises ValueError for state that was made for other options or another shape.
        """
        shapes = [param.detach().to("meta") for param in old]
        fresh = list(self._fresh_state(group, shapes).values())
        fits = True
        for (param, state), needed in zip(old.items(), fresh, strict=True):
            averages = {k: param.shape for k in self._BUFFERS if k in state}
            found = {k: v.shape for k, v in state.items() if k not in self._STARTS.values()}
            if found != {k: v.shape for k, v in needed.items()} | averages:
                raise ValueError(self._misfit(index, group, param, needed.keys() - state.keys()))
            dtypes = {k: v.dtype for k, v in needed.items()} | dict.fromkeys(
                averages, state_dtype(param)
            )
            fits &= all(
                state[k].dtype == dtype and state[k].device == param.device
                for k, dtype in dtypes.items()
            )
        return fits

    def _misfit(self, index: int, group: dict[str, Any], param: Tensor, missing: Set[str]) -> str:
        """Why a step cannot use the state of the parameter, and what to do."""
        name = parameter_name(index, group, param)
        afresh = f"delete it ({self._start_afresh(index, group, param)}) to start afresh"
        then = self._found_right.get(param)
        if then is not None:
            now = self._fitting(param, self._needs(group))
            was = dict(zip(self._LAYOUT_OPTIONS, then[0], strict=True))
            changes = [
                f"{option} from {was[option]!r} to {group[option]!r}"
                for option in self._LAYOUT_OPTIONS
                if was[option] != group[option]
            ]
            if now[2] != then[2]:
                changes.append(f"its shape from {list(then[2])} to {list(now[2])}")
            if changes:
                return (
                    f"the state of {name} does not fit after the change of {' and '.join(changes)}; "
                    f"change that back, or {afresh}"
                )
        if missing:
            return f"the state of {name} has lost {', '.join(map(repr, sorted(missing)))}; {afresh}"
        options = ", ".join(f"{option}={group[option]!r}" for option in self._LAYOUT_OPTIONS)
        return f"the state of {name} was made for another shape or for other options than {options}; {afresh}"

    def _begins_afresh(self, key: str, param: Tensor, group: dict[str, Any]) -> bool:
        """Whether a buffer means something else than in the last step of the parameter."""
        return False

    def _layout(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(group[name] for name in self._LAYOUT_OPTIONS)

    # ---- state

    def _fresh_state(self, group: dict[str, Any], params: list[Tensor]) -> dict[Tensor, State]:
        """State of parameters that have taken no step, in storage."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for param in params:
            by_device.setdefault(param.device, []).append(param)
        fresh: dict[Tensor, State] = {}
        for device, on_device in by_device.items():
            steps = torch.zeros(len(on_device), dtype=STEP_DTYPE, device=device)
            *storage, layout = self._allocated_storage(on_device, group)
            for i, param in enumerate(on_device):
                fresh[param] = {"step": steps[i]}
            for row in range(0, len(layout), 5):
                i, slot, buffer, start, count = layout[row : row + 5]
                for key, tensors in zip(matrix_keys(slot), storage, strict=True):
                    fresh[on_device[i]][key] = tensors[buffer].narrow(0, start, count)
            for param in on_device:
                state = fresh[param]
                state.update(self._elementwise_state(param, group, len(state) > 1))
        return fresh

    def _allocated_storage(
        self, params: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
        try:
            return self._block_storage(params, group)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            shapes = self._block_storage([p.to("meta") for p in params], group)
            size = sum(t.nbytes for tensors in shapes[:3] for t in tensors)
            raise torch.OutOfMemoryError(
                f"{type(self).__name__} needs {size / 2**30:.3g} GiB on {params[0].device} for the "
                f"statistics and roots of {len(params)} parameters; lower block_size, now "
                f"{group['block_size']}"
            ) from error

    def _block_state(
        self,
        index: int,
        group: dict[str, Any],
        params: list[Tensor],
        old: dict[Tensor, dict[str, Any]],
    ) -> dict[Tensor, State]:
        """Fresh state of ``params`` in canonical storage, with the values of ``old`` copied in."""
        stacked = self._fresh_state(group, params)
        optional = OptionalState(self._BUFFERS, tuple(self._STARTS.values()))
        fill_state(stacked, old, optional, lambda param: parameter_name(index, group, param))
        return stacked

    def _own_state(self, param: Tensor) -> State:
        """State of the parameter without what other code may keep there."""
        return {
            key: value
            for key, value in self.state[param].items()
            if key in self._ELEMENTWISE
            or key in self._BUFFERS
            or key in self._STARTS.values()
            or key.split(".")[0] in _MATRIX_KEYS
        }

    def _loaded_state(
        self, index: int, group: dict[str, Any], saved: dict[Tensor, dict[str, Any]]
    ) -> dict[Tensor, State]:
        return self._block_state(index, group, list(saved), saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._stacked = set(range(len(self.param_groups)))

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._plans = {}
        self._bound_to = None
        self._bound_needs = {}
        self._adopted = {}
        self._stacked = set()
        self._found_right = {}
        self._checked = set()
