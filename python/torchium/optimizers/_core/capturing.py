"""Optimizers that capture layer calls: K-FAC and natural gradient.

A step is one call for all groups, because a layer or a sample may have parameters of several.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import ParamsT

from ..._capture.capture import Capture
from ..._capture.compiled import forget_compiled
from .amp import ScaledLoss, unscaled_gradients
from .base import CoreOptimizer
from .checkpoint import as_tensors
from .curvature import as_number, check_curvature_arguments
from .parameters import State, given_name, parameter_names
from .plan import JointPlan, Report, Snapshot, failures
from .process_groups import group_name, processes
from .schedules import at_step, beside, new_group, schedules_in, without_functions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ParamsOrModel = ParamsT | nn.Module


class CapturingOptimizer(ScaledLoss, CoreOptimizer):
    """Base of the optimizers that capture the inputs and output gradients of layers."""

    # The class of its plan in the core.
    _PLAN: ClassVar[str]

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        defaults: dict[str, Any],
        grad_scaler: GradScaler | None,
        process_group: ProcessGroup | None,
    ) -> None:
        self.grad_scaler = grad_scaler
        self._group_name = group_name(process_group)
        self._is_copy = False
        self._init_capture()
        model = params_or_model if isinstance(params_or_model, nn.Module) else None
        params = params_or_model if model is None else list(model.named_parameters())
        defaults = without_functions(self._OPTIONS, defaults)
        super().__init__(params, defaults)  # type: ignore[arg-type]
        if model is not None:
            self._adopt({module: name for name, module in model.named_modules()})

    _capture: Capture
    _group_name: str  # its name; empty: none
    _plan: JointPlan | None
    # What the plan is bound to, and the checked options that it has.
    _bound_to: Snapshot | None
    _adopted: list[Any]

    @abstractmethod
    def _init_capture(self) -> None:
        """Creates the capture, and what else does not follow from groups and state."""

    @abstractmethod
    def _wants(self) -> bool:
        """Whether the next step needs layer calls."""

    @abstractmethod
    def _record_curvature(self, outputs: Tensor, *loss: Any) -> None:
        """Hands the calls that ``outputs`` depends on to the plan; ``loss``: arguments of the core."""

    @abstractmethod
    def _before_step(self, plan: JointPlan) -> None:
        """Hands captured calls to the plan; raises for layers that do not allow a step."""

    def _announce(self, plan: JointPlan) -> None:
        """Warns about limits of the planned step, before anything is changed."""

    # ---- the scaler

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Makes a scaler call step() even for a step to be skipped, so that captures are dropped."""
        return True

    def _captures_scaled_loss(self) -> bool:
        """Whether captured gradients have the factor of the loss."""
        return bool(self.param_groups[0]["fisher"] == "empirical")

    def _unknown_loss_scale(self) -> Tensor | None:
        """The factor that recorded calls still contain."""
        return self._loss_scale()

    def _unscaled_gradients(self) -> AbstractContextManager[Tensor | None]:
        """The gradients without the factor of the loss, during the step."""
        return unscaled_gradients(self)

    # ---- groups and modules

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(new_group(self._OPTIONS, param_group, self.defaults))
        self._bound_to = None
        self._decided = False  # without the new parameters
        forget_compiled()
        self._capture.watch(self.param_groups[-1]["params"])

    def _check_new_group(self, index: int, group: dict[str, Any]) -> None:
        super()._check_new_group(index, group)
        known = [beside(self._OPTIONS, each, group) for each in self.param_groups]
        self._check_shared([*known, group])

    def _adopt(self, modules: dict[nn.Module, str]) -> None:
        for module, name in modules.items():
            self._capture.adopt(module, name)
        self._capture.settle()

    def _check_shared(self, groups: list[dict[str, Any]]) -> None:
        values = tuple(self._OPTIONS.values(group) for group in groups)
        torch.ops.torchium.check_same_in_all(self._OPTIONS.optimizer, values)

    def _short_names(self) -> dict[Tensor, str]:
        """The names that the optimizer was given, or where the parameters are."""
        return {
            param: given_name(group, i) or f"parameter {i} of group {g}"
            for g, group in enumerate(self.param_groups)
            for i, param in enumerate(group["params"])
        }

    def _module_name(self, module: nn.Module) -> str:
        name = self._capture.modules.get(module, "")
        kind = type(module).__name__
        return f"layer {name!r} ({kind})" if name else f"a layer of type {kind}"

    # ---- the step

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._forget_calls()

    def _follow_schedules(self) -> None:
        """Sets the options that are functions of the step number."""
        functions = [schedules_in(self._OPTIONS, group) for group in self.param_groups]
        if any(functions):
            if self.param_groups[0].get("capturable"):
                raise ValueError(
                    f"{next(name for each in functions for name in each)} is a function of the step, which a "
                    "captured step cannot follow; pass a number, or capturable=False"
                )
            steps = self._bound_plan().core.next_steps(len(self.param_groups))
            values = [
                at_step(self._OPTIONS, *each, max(steps)) if each[0] else {}
                for each in zip(functions, steps, strict=True)
            ]
            groups = [{**g, **v} for g, v in zip(self.param_groups, values, strict=True)]
            self._check_shared(groups)
            for group, new in zip(self.param_groups, values, strict=True):
                group.update(new)

    def _step_groups(self) -> None:
        try:
            self._follow_schedules()
            for index, group in enumerate(self.param_groups):  # a wrong option leaves the captures
                self._check_changed_options(index, group)
        except BaseException:
            self._withdraw()
            if not self._decided:  # the option was wrong before the forward pass too
                self._forget_calls()
            raise
        reaches_plan = False  # which agrees with other ranks
        try:
            self._refuse_misuse()
            plan = self._bound_plan()
            self._adopt_options(plan)
            self._before_step(plan)
            if not plan.core.prepare():
                self._complete_state(plan)
            self._announce(plan)
            lrs = [group["lr"] for group in self.param_groups]
            with self._unscaled_gradients() as found_inf:
                scale = self._unknown_loss_scale()
                reaches_plan = True
                self._change_state(plan, plan.step(lrs, found_inf, scale))
        except BaseException:
            if not reaches_plan:
                self._withdraw()
            raise
        finally:
            self._forget_calls()
            self._capture.settle()

    def _withdraw(self) -> None:
        if self._group_name:
            self._own_plan().core.withdraw()

    def _forget_calls(self) -> None:
        self._decided = False
        self._capture.forget()
        if self._plan is not None:
            self._plan.core.forget()

    def _decide(self) -> JointPlan | None:
        """The plan, with which the first forward pass decides whether the next step needs calls.

        None: an option is wrong, or its function fails, for which ``step()`` raises.
        """
        self._decided = True
        plan = self._bound_plan()
        try:
            self._follow_schedules()
            self._adopt_options(plan)
        except Exception:
            self._decided = False
            return None
        return plan

    def _bound_plan(self) -> JointPlan:
        """The plan, bound to the current groups and state."""
        plan = self._own_plan()
        if self._bound_to is None or not self._bound_to.is_of(self.param_groups, self.state):
            self._bind(plan)
        return plan

    def _own_plan(self) -> JointPlan:
        if self._plan is None:
            self._plan = JointPlan(self._PLAN, self._OPTIONS.optimizer, self._group_name)
        return self._plan

    def _bind(self, plan: JointPlan) -> None:
        self._bound_to = None  # until it is done
        self._capture.watch_new(p for group in self.param_groups for p in group["params"])
        plan.bind(self.param_groups, self.state)
        self._bound_to = Snapshot(self.param_groups, self.state)

    def _adopt_options(self, plan: JointPlan) -> None:
        """Hands changed options to the plan."""
        for index, group in enumerate(self.param_groups):
            self._check_changed_but_lr(index, group)
        checked = [self._checked_options[index] for index in range(len(self.param_groups))]
        if len(checked) != len(self._adopted) or not all(map(is_, checked, self._adopted)):
            self._check_shared(self.param_groups)
            plan.core.set_options(tuple(self._OPTIONS.values(g) for g in self.param_groups))
            self._adopted = checked

    def _complete_state(self, plan: JointPlan) -> None:
        """Checks everything, creates missing state, and plans the step."""
        self._check_unsharded()
        self._bind(plan)
        changes = plan.core.missing_state()
        self._announce(plan)
        self._change_state(plan, changes)
        self._bind(plan)
        if not plan.core.prepare():
            raise RuntimeError("parameters, gradients or state changed during step()")

    def _change_state(self, plan: JointPlan, changes: list[tuple[int, str, Tensor | None]]) -> None:
        for i, key, value in changes:
            state = self.state[plan.params[i]]
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value

    def _update_curvature(self, outputs: Tensor, *loss: Any) -> None:
        """The body of ``update_curvature()``."""
        check_curvature_arguments(outputs, *loss)
        torch.ops.torchium.check_takes_curvature(self.param_groups[0]["fisher"])
        if self._wants():
            self._record_curvature(outputs, *loss)

    def _update_damping(self, loss_before: float | Tensor, loss_after: float | Tensor) -> float:
        """The body of ``update_damping()``."""
        try:
            if any("damping" in schedules_in(self._OPTIONS, group) for group in self.param_groups):
                raise ValueError(
                    "damping is a function of the step, which update_damping() cannot change; pass a number "
                    "to start from"
                )
            plan = self._bound_plan()
            self._adopt_options(plan)
            losses = as_number("loss_before", loss_before), as_number("loss_after", loss_after)
        except BaseException:
            self._withdraw()
            raise
        ratio, factor = plan.core.damping_update(*losses)
        for group in self.param_groups:
            group["damping"] *= factor
        return float(ratio)

    def _take_reports(self, wait: bool) -> list[Report]:
        if self._plan is None:
            return []
        if wait:
            self._plan.core.request_report()
        return failures(self._plan.core.next_failure, wait)

    def _memory(self) -> tuple[Any, ...]:
        return self._own_plan().memory(self.param_groups, self.state, self._short_names())

    def _refuse_misuse(self) -> None:
        name = type(self).__name__
        if not self._group_name and processes() > 1:
            raise RuntimeError(
                f"{name} has no process_group, but {processes()} processes run: what their layers capture "
                "would not be combined, and their parameters would drift apart. Share the step: "
                f"{name}(..., process_group=torch.distributed.group.WORLD)"
            )
        if self._has_lost_scale() and self._captures_scaled_loss():
            raise ValueError(
                f"{name} does not know the loss scale after unscale_(), and what its layers captured "
                "is still scaled; pass grad_scaler=scaler, or set the attribute grad_scaler"
            )
        if self._is_copy and not self._capture.ran:
            raise RuntimeError(
                f"this {name} is a copy, and none of its layers has run since: the model that did is "
                "another one. Copy or save model and optimizer together, "
                "as in copy.deepcopy((model, optimizer)), or use state_dict()"
            )
        self._is_copy = False

    # ---- state

    def _remember_options(self) -> None:
        try:
            self._adopt_options(self._own_plan())
        except (KeyError, ValueError):  # of a copy, or its group is gone: the next step raises it
            self._adopted = []

    def _check_saved_groups(self, state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        super()._check_saved_groups(state_dict, groups)
        self._check_shared(groups)

    def _loaded_state(
        self, index: int, group: dict[str, Any], saved: dict[Tensor, dict[str, Any]]
    ) -> dict[Tensor, State]:
        core = JointPlan(self._PLAN, self._OPTIONS.optimizer, "").core
        options = self._OPTIONS.values(group)
        count = sum(len(group["params"]) for group in self.param_groups)
        loaded: dict[Tensor, State] = {}
        for param, name in zip(group["params"], parameter_names(index, group), strict=True):
            if param in saved:
                values = as_tensors(saved[param], name)
                loaded[param] = core.load(param, values, options, count, name)
        return loaded

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._capture.core.warn_of_gradients_without_calls()
        self._plan = None
        self._bound_to = None
        self._adopted = []
        self._decided = False
        self._capture.forget()

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its own hooks. It has no scaler, because a copied scaler would not be updated.
        return {
            **super().__getstate__(),
            "modules": dict(self._capture.modules),
            "time_first": self._capture.time_first & self._capture.modules.keys(),
            "_group_name": self._group_name,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        modules, time_first = state.pop("modules"), state.pop("time_first")
        self.grad_scaler = None
        self._init_capture()
        super().__setstate__(state)
        forget_compiled()
        for group in self.param_groups:
            self._capture.watch(group["params"])
        self._capture.time_first.update(time_first)
        self._adopt(modules)
        self._is_copy = bool(modules)
