"""Base of all torchium optimizers: groups, ``step()``, checkpoints, late error reports.

The state of a parameter is ordinary tensors in ``self.state[p]``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from .amp import forget_scaler
from .checkpoint import foreign_states, saved_groups, saved_states, split_state
from .keywords import warn_of_ignored, with_known_keywords
from .memory import MemoryReport
from .options import OptionList
from .parameters import (
    State,
    check_parameter,
    check_params,
    check_unsharded,
    parameter_name,
    parameter_names,
    with_own_tensors,
)
from .plan import Report
from .schedules import SCHEDULES, without_schedules


class CoreOptimizer(Optimizer):
    """Base of the optimizers, whose step runs in the compiled core."""

    _OPTIONS: ClassVar[OptionList]
    _can_share: ClassVar[bool] = False  # a step, among ranks, and so DTensor parameters
    _takes_steps: ClassVar[bool] = True  # else another optimizer, which may read the same groups
    # An option by which a checkpoint of this optimizer is recognised.
    _OWN_OPTION: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = with_known_keywords(cls.__name__, cls.__init__)  # type: ignore[method-assign]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        check_params(params, type(self).__name__)
        self._forget_derived()
        lr = self._OPTIONS.checked_lr(defaults["lr"])
        checked = {"lr": lr, **self._OPTIONS.checked(defaults)}
        if SCHEDULES in defaults:
            checked[SCHEDULES] = defaults[SCHEDULES]
        super().__init__(params, checked)
        self.register_state_dict_post_hook(_clone_state)

    # ---- what an optimizer defines

    @abstractmethod
    def _step_groups(self) -> None:
        """Checks all groups, then steps them."""

    @abstractmethod
    def _withdraw(self) -> None:
        """Called instead of ``_step_groups`` after an error: ranks that share the step raise too."""

    @abstractmethod
    def _loaded_state(
        self, index: int, group: dict[str, Any], saved: dict[Tensor, dict[str, Any]]
    ) -> dict[Tensor, State]:
        """Checks the saved values; returns fresh state of the parameters in ``saved`` with them."""

    @abstractmethod
    def _remember_options(self) -> None:
        """Gives the plans the options that the state belongs to: others may be set before the next step."""

    @abstractmethod
    def _memory(self) -> tuple[Any, ...]:
        """The arguments of ``MemoryReport.from_core()``."""

    def _check_saved_groups(self, state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Raises ValueError for groups of another optimizer, or that contradict each other."""
        for index, group in enumerate(state_dict["param_groups"]):
            if self._OWN_OPTION not in group:
                raise ValueError(
                    f"state_dict is not one of {type(self).__name__}: {self._OWN_OPTION!r} is missing "
                    f"from parameter group {index}"
                )

    # ---- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as :meth:`torch.optim.Optimizer.add_param_group` does.

        Options left out are the optimizer's. Raises ``ValueError``, and adds nothing, for an option
        out of its range and for a sparse, complex, integer, expanded, uninitialized, ``DTensor`` or
        flattened (``FullyShardedDataParallel``) parameter. An optimizer that was made from a model has
        named its parameters: pass ``{"params": module.named_parameters()}``. Other keys are kept and
        ignored, as in PyTorch; a warning names those that are misspelt options, or that would have an
        effect in other optimizers, such as ``amsgrad=True``.
        """
        try:
            super().add_param_group(param_group)
        except ValueError:
            self._check_names(param_group)  # PyTorch's message has no remedy
            raise
        group = self.param_groups.pop()  # added again once it is checked
        self._check_new_group(len(self.param_groups), group)
        self.param_groups.append(group)

    def _check_names(self, group: dict[str, Any]) -> None:
        """Raises ValueError if only the new group has names of parameters, or only the others."""
        is_named = "param_names" in group
        if not self.param_groups or is_named == ("param_names" in self.param_groups[0]):
            return
        remedy = (
            "has names of its parameters, but the other groups have none; pass module.parameters()"
            if is_named
            else "has no names of its parameters, but the other groups have, from a model or "
            "named_parameters(); pass module.named_parameters()"
        )
        raise ValueError(f"group {len(self.param_groups)} {remedy} as params") from None

    def _check_new_group(self, index: int, group: dict[str, Any]) -> None:
        """Checks ``group``, the future group ``index``, and converts its options to plain Python."""
        group["lr"] = self._OPTIONS.checked_lr(group["lr"])
        group.update(self._OPTIONS.checked(group))
        if len(set(group["params"])) != len(group["params"]):
            raise ValueError(f"params of group {index} hold a parameter more than once")
        for param, name in zip(group["params"], parameter_names(index, group), strict=True):
            check_parameter(param, name, takes_shards=self._can_share)
        check_unsharded(index, group, group["params"])
        warn_of_ignored(
            type(self).__name__,
            [*self.param_groups, group],
            self._OPTIONS.names,
            is_alone=self._takes_steps,
        )

    # ---- the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    # Tracing gains nothing here, and would be repeated for every new learning rate.
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs one optimization step.

        Args:
            closure: computes the loss and its gradients again and returns the loss; called once,
                with gradients enabled. Optional.

        Returns:
            The result of ``closure``, or None without one.

        Raises:
            RuntimeError: a gradient was not finite, or too large to square (``docs/design.md``,
                "Numerical contract"), in three steps of a group in a row, or a root
                failed ``max_root_failures`` times in a row. On a GPU this is reported by a later
                step; :meth:`check_errors` reports it at once.
            ValueError: a gradient is sparse or complex. Nothing is changed then.
        """
        try:
            try:
                self._raise_failures()
            except BaseException:
                self._withdraw()
                raise
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step_groups()
            self._raise_failures()
        except BaseException:
            forget_scaler(self)
            raise
        return loss

    def check_errors(self) -> None:
        """Waits for all steps so far and raises ``RuntimeError`` if one of them failed.

        On a GPU a step does not wait for its own result, and replays of a CUDA graph report nothing:
        call this where a wait does not hurt, for example once per epoch. See :meth:`step` for the
        errors. With ``capturable=True`` and a ``process_group`` all ranks must call it.
        """
        self._reports += self._take_reports(wait=True)
        self._raise_failures()

    def _check_changed_options(self, index: int, group: dict[str, Any]) -> None:
        """Checks options that were set in ``param_groups`` since the last step."""
        lr = group["lr"]
        if isinstance(lr, Tensor):
            self._OPTIONS.check_lr_tensor(lr)
            if lr.is_cpu:  # no step waits for a device
                self._checked_lr(index, lr.item())
        else:
            group["lr"] = self._checked_lr(index, lr)
        self._check_changed_but_lr(index, group)

    def _checked_lr(self, index: int, lr: Any) -> float:
        if type(lr) is not float or self._checked_lrs.get(index) != lr:
            self._checked_lrs[index] = self._OPTIONS.checked_one("lr", lr)
        return self._checked_lrs[index]

    def _check_changed_but_lr(self, index: int, group: dict[str, Any]) -> None:
        options = tuple([group[name] for name in self._OPTIONS.names])
        if self._checked_options.get(index) != options:
            group.update(self._OPTIONS.checked(group))
            self._checked_options[index] = tuple(group[name] for name in self._OPTIONS.names)

    def _check_unsharded(self) -> None:
        """Of the parameters that the next step gives a state."""
        for index, group in enumerate(self.param_groups):
            fresh = (p for p in group["params"] if p.grad is not None and not self._has_state(p))
            check_unsharded(index, group, fresh)

    def _has_state(self, param: Tensor) -> bool:
        return "step" in self.state.get(param, ())

    # ---- state

    def _forget_derived(self) -> None:
        """Drops everything that can be rebuilt from the groups and the state."""
        self._reports: list[Report] = []  # not yet raised
        self._checked_options: dict[int, tuple[Any, ...]] = {}
        self._checked_lrs: dict[int, float] = {}

    # ---- memory

    def memory_report(self) -> MemoryReport:
        """Bytes that the optimizer holds.

        :class:`Shampoo`, :class:`Adagrad` and :class:`AdaHessian` count the future state of parameters that
        require a gradient but have none yet; the others only parameters that have state, because that of a layer
        follows from its first call. Allocates nothing.

        Returns:
            A report whose ``groups`` and ``total`` hold the bytes by kind, and ``parameters`` those of each
            parameter's state; ``print`` shows a table.

        Example:
            >>> print(torchium.Shampoo(model.parameters()).memory_report())
        """
        return MemoryReport.from_core(*self._memory())

    # ---- checkpoints

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a result of :meth:`state_dict`, on any device.

        State keeps the optimizer's own dtype (float32 under bfloat16 parameters) and is copied, so
        later steps do not change the checkpoint. Options of the parameter groups come from the
        checkpoint. A checkpoint that does not fit, or has NaN, Inf or a negative count, raises
        ``ValueError`` and loads nothing. An average that it lacks, such as ``exp_avg``, starts with the
        next step, unless the rule of a parameter needs it. Entries of other code in the state of a
        parameter, under names that no torchium optimizer uses, are copied to the parameter's device.
        """
        if isinstance(state_dict, dict):
            state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            hook_result = pre_hook(self, state_dict)
            if hook_result is not None:
                state_dict = hook_result

        groups = saved_groups(state_dict, self.param_groups)
        self._check_saved_groups(state_dict, groups)
        old = saved_states(state_dict, groups)
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for index, group in enumerate(groups):
            group["lr"] = self._OPTIONS.checked_lr(group["lr"])
            group.update(self._OPTIONS.checked(group))
            split = {p: split_state(old[p], p.device) for p in group["params"] if p in old}
            saved = {p: own for p, (own, _) in split.items() if own}
            loaded = self._loaded_state(index, group, saved)
            state.update(loaded)
            for param, (_, foreign) in split.items():
                state[param].update(foreign)

        self.state = state
        self.state.update(foreign_states(state_dict))
        self.param_groups = groups
        self._forget_derived()
        self._remember_options()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        # A pickled view would include its whole buffer.
        state = super().__getstate__()
        return {**state, "state": defaultdict(dict, _cloned(state["state"]))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_derived()
        self._remember_options()
        self.register_state_dict_post_hook(_clone_state)

    # ---- failures

    @abstractmethod
    def _take_reports(self, wait: bool) -> Sequence[Report]:
        """Reports of the steps known to be done, or of all of them after a wait."""

    def _raise_failures(self) -> None:
        """Raises for the first failure of the steps that are known to be done."""
        reports = [*self._reports, *self._take_reports(wait=False)]
        self._reports = []
        for group, skips, non_finite, failures, failed in reports:
            if group >= len(self.param_groups):  # removed by hand since
                continue
            step = None if non_finite is None else self.state.get(non_finite, {}).get("step")
            message = torch.ops.torchium.failure_message(
                self._OPTIONS.optimizer,
                *(skips, non_finite, step, self._describe(non_finite)),
                *(failures, self._describe(failed)),
                self.param_groups[group].get("max_root_failures", 3),
            )
            if message:
                raise RuntimeError(f"{type(self).__name__}: {message}")

    def _describe(self, param: Tensor | None) -> str:
        for index, group in enumerate(self.param_groups):
            if any(p is param for p in group["params"]):
                return parameter_name(index, group, param)
        return "a parameter"


def _clone_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Copies state and learning rates into a state dict: a saved view would include its whole buffer.

    Functions are left out.
    """
    groups = [with_own_tensors(without_schedules(group)) for group in state_dict["param_groups"]]
    return {**state_dict, "state": _cloned(state_dict["state"]), "param_groups": groups}


def _cloned(states: dict[Any, Any]) -> dict[Any, Any]:
    """The same with copies of the tensors; other code may keep anything besides the state of parameters."""
    return {
        key: with_own_tensors(state) if isinstance(state, dict) else state
        for key, state in states.items()
    }
