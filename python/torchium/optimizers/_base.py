"""What all torchium optimizers share: groups, state, checkpoints and late error reports.

The state of a parameter is ordinary tensors in ``self.state[p]``. Those that are worked on in
batches are views of stacks (``src/optim/stacks.h``); a stack is a memory layout only, and a function
of the set of parameters of its group that have state, so that a resumed run continues bit for bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from ._checkpoint import check_state, saved_groups, saved_states
from ._monitor import MAX_CONSECUTIVE_SKIPS, Report, StatusMonitor, refuse_capture
from ._options import Check, check_options, learning_rate
from ._parameters import check_dense, is_out_of_memory, is_plain, parameter_name, state_zeros

State = dict[str, Tensor]

_MATRIX_KEYS = ("statistics", "roots", "root_failures")


@cache
def matrix_keys(slot: int) -> tuple[str, ...]:
    """State keys of one slot: the matrices of one mode of one block shape of a parameter."""
    return tuple(f"{key}.{slot}" for key in _MATRIX_KEYS)


def matrix_lists(states: Iterable[State]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Statistics, roots and failure counts of all slots, in (parameter, slot) order."""
    lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for state in states:
        slot = 0
        while (keys := matrix_keys(slot))[0] in state:
            for tensors, key in zip(lists, keys, strict=True):
                tensors.append(state[key])
            slot += 1
    return lists


@dataclass(frozen=True)
class StepArguments:
    """The parameters of one group on one device that have a gradient, and their state."""

    group_index: int
    group: dict[str, Any]
    device: torch.device
    params: list[Tensor]
    grads: list[Tensor]


class CoreOptimizer(Optimizer):
    """Base of the optimizers whose step is one operator of the compiled core."""

    # Checks of all options but ``lr``.
    _CHECKS: ClassVar[dict[str, Check]]
    # Options that the shapes of the state depend on.
    _LAYOUT_OPTIONS: ClassVar[tuple[str, ...]]
    # Keys of the state that is no matrix and always there, if it applies to the parameter.
    _ELEMENTWISE: ClassVar[tuple[str, ...]]
    # State of the parameter's shape that is made when an option first needs it.
    _BUFFERS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._forget_derived()
        lr = learning_rate("lr", defaults["lr"])
        defaults = {"lr": lr, **check_options(self._CHECKS, defaults)}
        self._check_combination(defaults)
        super().__init__(params, defaults)
        self.register_state_dict_post_hook(_clone_state)

    # ---- what an optimizer defines

    @abstractmethod
    def _matrix_stacks(
        self, params: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
        """Fresh stacks of statistics, roots and failure counts, and their layout."""

    @abstractmethod
    def _elementwise_state(self, param: Tensor, group: dict[str, Any], has_matrices: bool) -> State:
        """Fresh state of the parameter's shape that is always there."""

    @abstractmethod
    def _needed_buffers(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Those of ``_BUFFERS`` that a step with these options uses."""

    @abstractmethod
    def _run_step(
        self, step: StepArguments, states: list[State], status: Tensor, host_steps: list[int]
    ) -> None:
        """Calls the step operator."""

    @abstractmethod
    def _host_decides(self, group: dict[str, Any]) -> bool:
        """Whether the host decides in a step which roots are due."""

    def _check_combination(self, options: dict[str, Any]) -> None:
        """Raises ValueError for options that are right alone but not together."""

    def _max_root_failures(self, group: dict[str, Any]) -> int:
        return int(group.get("max_root_failures", 3))

    # ---- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as :meth:`torch.optim.Optimizer.add_param_group` does.

        Options left out are the optimizer's. Raises ``ValueError``, and adds nothing, for an option
        out of its range and for a sparse, complex, integer or ``DTensor`` parameter.
        """
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            index = len(self.param_groups) - 1
            group["lr"] = learning_rate("lr", group["lr"])
            group.update(check_options(self._CHECKS, group))
            self._check_combination(group)
            if len(set(group["params"])) != len(group["params"]):
                raise ValueError(f"params of group {index} hold a parameter more than once")
            for param in group["params"]:
                check_dense(param, parameter_name(index, group, param))
        except ValueError:
            self.param_groups.pop()
            raise

    # ---- the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    # Nothing here gains from tracing, and every new learning rate would be traced again.
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs one optimization step.

        Args:
            closure: computes the loss and its gradients again and returns the loss; called once,
                with gradients enabled. Optional.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            RuntimeError: a gradient was not finite in three steps of a group in a row, or a root
                failed ``max_root_failures`` times in a row. On a GPU this is reported by a later
                step; :meth:`check_errors` reports it at once.
            ValueError: a gradient is sparse or complex. Nothing is changed then.
        """
        self._raise_failures(self._monitor.poll())
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # All groups are checked before any is changed.
        steps = [s for i, group in enumerate(self.param_groups) for s in self._arguments(i, group)]
        self._add_state(steps, [self._missing_state(step) for step in steps])
        for step in steps:
            self._launch(step)
        self._raise_failures(self._monitor.poll())
        return loss

    def check_errors(self) -> None:
        """Waits for the steps so far and raises ``RuntimeError`` if one of them went wrong.

        On a GPU a step never waits for its own result, and replays of a CUDA graph report nothing:
        call this where a wait does not hurt, for example once an epoch. See :meth:`step` for what
        is raised.
        """
        self._raise_failures(self._monitor.wait())

    def _arguments(self, index: int, group: dict[str, Any]) -> list[StepArguments]:
        """What a step of the group takes, one entry a device, checked."""
        self._check_changed_options(index, group)
        grads = [p.grad for p in group["params"]]
        params = [p for p, g in zip(group["params"], grads, strict=True) if g is not None]
        grads = [g for g in grads if g is not None]
        if not all(is_plain(*kind) for kind in {(type(g), g.layout, g.dtype) for g in grads}):
            for param, grad in zip(params, grads, strict=True):
                check_dense(grad, f"gradient of {parameter_name(index, group, param)}")
        devices = {p.device for p in params}
        if len(devices) == 1:
            return [StepArguments(index, group, devices.pop(), params, grads)]
        steps = []
        for device in sorted(devices, key=str):
            mask = [p.device == device for p in params]
            on_device = [
                [t for t, m in zip(tensors, mask, strict=True) if m] for tensors in (params, grads)
            ]
            steps.append(StepArguments(index, group, device, *on_device))
        return steps

    def _check_changed_options(self, index: int, group: dict[str, Any]) -> None:
        """Checks options again that were set in ``param_groups`` since the last step."""
        if not isinstance(group["lr"], Tensor):
            learning_rate("lr", group["lr"])
        options = tuple(group[name] for name in self._CHECKS)
        if self._checked_options.get(index) != options:
            group.update(check_options(self._CHECKS, group))
            self._checked_options[index] = tuple(group[name] for name in self._CHECKS)

    def _missing_state(self, step: StepArguments) -> dict[Tensor, State]:
        """State that parameters of the step lack, or that must move for those to be stacked."""
        group, index = step.group, step.group_index
        state: dict[Tensor, State] = {}
        if self._layouts.get(index) != self._layout(group) or not all(
            map(self._has_state, step.params)
        ):
            active = set(step.params)
            params = [p for p in group["params"] if p in active or self._has_state(p)]
            old = {p: self._own_state(p) for p in params if self._has_state(p)}
            state = self._stacked_state(index, group, params, old)
        for key in self._needed_buffers(group):
            for param in step.params:
                if key not in self.state.get(param, ()):
                    state.setdefault(param, {}).setdefault(key, state_zeros(param))
        if state:
            refuse_capture(step.device, "state has to be created; run a step before the capture")
        return state

    def _add_state(self, steps: list[StepArguments], missing: list[dict[Tensor, State]]) -> None:
        for step, states in zip(steps, missing, strict=True):
            self._layouts[step.group_index] = self._layout(step.group)
            for param, state in states.items():
                if param.is_cuda and not self._has_state(param):
                    self._host_steps[param] = 0
                self.state[param].update(state)

    def _layout(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(group[name] for name in self._LAYOUT_OPTIONS)

    def _launch(self, step: StepArguments) -> None:
        """Runs the operator; on a GPU this returns before the step is done."""
        states = [self.state[p] for p in step.params]
        host_steps: list[int] = []
        if step.device.type == "cuda":
            if self._host_decides(step.group):
                refuse_capture(step.device, "the host decides in step() which roots are due")
                host_steps = self._known_host_steps(step.params)
                self._host_steps.update(zip(step.params, (n + 1 for n in host_steps), strict=True))
            elif self._host_steps:  # replays of a captured step advance the device's count alone
                for param in step.params:
                    self._host_steps.pop(param, None)
        key = (step.group_index, step.device)
        self._run_step(step, states, self._monitor.status(key), host_steps)
        self._monitor.watch(key, step.params)

    def _has_state(self, param: Tensor) -> bool:
        return "step" in self.state.get(param, ())

    def _known_host_steps(self, params: list[Tensor]) -> list[int]:
        """Steps each parameter has taken; read from the device where the host does not know."""
        unknown = [p for p in params if p not in self._host_steps]
        if unknown:  # a wait, but only after a load or a copy
            counts = torch.stack([self.state[p]["step"] for p in unknown]).tolist()
            self._host_steps.update(zip(unknown, map(int, counts), strict=True))
        return [self._host_steps[p] for p in params]

    # ---- state

    def _fresh_state(self, group: dict[str, Any], params: list[Tensor]) -> dict[Tensor, State]:
        """State of parameters that have taken no step, in stacks."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for param in params:
            by_device.setdefault(param.device, []).append(param)
        fresh: dict[Tensor, State] = {}
        for device, on_device in by_device.items():
            steps = torch.zeros(len(on_device), dtype=torch.float32, device=device)
            *stacks, layout = self._allocated_stacks(on_device, group)
            for i, param in enumerate(on_device):
                fresh[param] = {"step": steps[i]}
            for row in range(0, len(layout), 5):
                i, slot, stack, start, count = layout[row : row + 5]
                for key, tensors in zip(matrix_keys(slot), stacks, strict=True):
                    fresh[on_device[i]][key] = tensors[stack].narrow(0, start, count)
            for param in on_device:
                state = fresh[param]
                state.update(self._elementwise_state(param, group, len(state) > 1))
        return fresh

    def _allocated_stacks(
        self, params: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
        try:
            return self._matrix_stacks(params, group)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            shapes = self._matrix_stacks([p.to("meta") for p in params], group)
            size = sum(t.nbytes for tensors in shapes[:3] for t in tensors)
            raise torch.OutOfMemoryError(
                f"{type(self).__name__} needs {size / 2**30:.3g} GiB on {params[0].device} for the "
                f"statistics and roots of {len(params)} parameters; lower block_size, now "
                f"{group['block_size']}"
            ) from error

    def _stacked_state(
        self,
        index: int,
        group: dict[str, Any],
        params: list[Tensor],
        old: dict[Tensor, dict[str, Any]],
    ) -> dict[Tensor, State]:
        """Fresh state of ``params`` in canonical stacks, with the values of ``old`` copied in."""
        stacked = self._fresh_state(group, params)
        for param, values in old.items():
            check_state(
                values,
                stacked[param],
                param.shape,
                self._BUFFERS,
                parameter_name(index, group, param),
            )
        for param, values in old.items():
            state = stacked[param]
            for key, value in values.items():
                if key not in state:
                    state[key] = state_zeros(param)
                if isinstance(value, Tensor):
                    state[key].copy_(value.reshape(state[key].shape))
                else:
                    state[key].fill_(value)
        return stacked

    def _own_state(self, param: Tensor) -> State:
        """State of the parameter without what other code may keep there."""
        return {
            key: value
            for key, value in self.state[param].items()
            if key in self._ELEMENTWISE or key in self._BUFFERS or key.split(".")[0] in _MATRIX_KEYS
        }

    def _forget_derived(self) -> None:
        """Drops what can be rebuilt from the groups and the state."""
        self._monitor = StatusMonitor()
        # Of each group: what _layout() gave when its stacks were built.
        self._layouts: dict[int, tuple[Any, ...]] = {}
        self._checked_options: dict[int, tuple[Any, ...]] = {}
        self._host_steps: dict[Tensor, int] = {}

    # ---- checkpoints

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned, on any device.

        State keeps the optimizer's own dtype (float32 under bfloat16 parameters) and is copied, so
        that the checkpoint is never changed by later steps. Options of the parameter groups come
        from the checkpoint. A checkpoint that does not fit raises ``ValueError``, with both shapes,
        and loads nothing.
        """
        if isinstance(state_dict, dict):
            state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            hook_result = pre_hook(self, state_dict)
            if hook_result is not None:
                state_dict = hook_result

        groups = saved_groups(state_dict, self.param_groups)
        old = saved_states(state_dict, groups)
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for index, group in enumerate(groups):
            group["lr"] = learning_rate("lr", group["lr"])
            group.update(check_options(self._CHECKS, group))
            params = [p for p in group["params"] if p in old]
            state.update(self._stacked_state(index, group, params, {p: old[p] for p in params}))

        self.state = state
        self.param_groups = groups
        self._forget_derived()
        self._layouts = {index: self._layout(group) for index, group in enumerate(groups)}
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        # A view would take its whole stack along.
        state = super().__getstate__()
        return {**state, "state": defaultdict(dict, _cloned(state["state"]))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_derived()
        self.register_state_dict_post_hook(_clone_state)

    # ---- failures

    def _raise_failures(self, reports: Sequence[Report]) -> None:
        """Corrects the host's step counts by skipped steps, then raises for the first failure."""
        for report in reports:
            if report.skipped:
                for param in report.params:
                    if param in self._host_steps:
                        self._host_steps[param] -= 1
        for report in reports:
            if report.group >= len(self.param_groups):  # removed by hand since
                continue
            group = self.param_groups[report.group]
            if report.consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
                raise RuntimeError(
                    f"{type(self).__name__}: {report.consecutive_skips} steps in a row had a "
                    "gradient that is not finite and were skipped, the last one that of "
                    f"{parameter_name(report.group, group, report.non_finite)}; lower lr, clip gradients or "
                    "use a GradScaler"
                )
            if report.root_failures >= self._max_root_failures(group):
                raise RuntimeError(
                    f"{type(self).__name__}: the root of a preconditioner of "
                    f"{parameter_name(report.group, group, report.failed)} failed {report.root_failures} "
                    "times in a row; raise eps or relative_eps"
                )


def _clone_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Makes a state dict a snapshot: a saved view would take its whole stack along."""
    return {**state_dict, "state": _cloned(state_dict["state"])}


def _cloned(states: dict[Any, State]) -> dict[Any, State]:
    return {
        key: {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        for key, state in states.items()
    }
