"""Optimizers that see the layers of a model at work: K-FAC and natural gradient.

One step is one call for all parameters of all groups, since their factors or samples belong together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import ParamsT

from ..._capture.capture import Capture
from .amp import on_device, unscale_gradients
from .base import CoreOptimizer
from .monitor import JOINT, refuse_capture
from .options import lr_tensor
from .parameters import (
    STEP_DTYPE,
    State,
    check_unsharded,
    fresh_step,
    parameter_name,
    short_name,
    state_dtype,
    state_zeros,
)

ParamsOrModel = ParamsT | nn.Module


@dataclass(frozen=True)
class JointStep:
    """The parameters of all groups that have a gradient; one group a parameter."""

    params: list[Tensor]
    grads: list[Tensor]
    groups: list[dict[str, Any]]
    device: torch.device

    def per_param(self, option: str) -> list[Any]:
        return [group[option] for group in self.groups]

    def lrs(self) -> list[Tensor]:
        """The learning rate of each parameter, one tensor a group."""
        groups = {id(g): g for g in self.groups}
        tensors = {key: lr_tensor(g["lr"], self.device) for key, g in groups.items()}
        return [tensors[id(g)] for g in self.groups]


class CapturingOptimizer(CoreOptimizer):
    """Base of the optimizers that capture inputs and output gradients of layers."""

    # Keys of the state that is in the state dtype.
    _IN_STATE_DTYPE: ClassVar[frozenset[str]] = frozenset({"momentum_buffer"})
    # An option that no other optimizer has.
    _OWN_OPTION: ClassVar[str]
    _ROOT_REMEDY = "raise damping or lower lr"

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        defaults: dict[str, Any],
        grad_scaler: GradScaler | None,
    ) -> None:
        self.grad_scaler = grad_scaler
        self._is_copy = False
        self._init_capture()
        model = params_or_model if isinstance(params_or_model, nn.Module) else None
        params = params_or_model if model is None else list(model.named_parameters())
        super().__init__(params, defaults)  # type: ignore[arg-type]
        if model is not None:
            self._adopt({module: name for name, module in model.named_modules()})

    _capture: Capture
    _group_by_param: dict[Tensor, dict[str, Any]] | None

    @abstractmethod
    def _init_capture(self) -> None:
        """Makes a capture, and whatever else does not follow from groups and state."""

    @abstractmethod
    def _step_joint(self, step: JointStep) -> None:
        """Checks the step, then takes it."""

    # ---- the scaler

    @property
    def grad_scaler(self) -> GradScaler | None:
        """The :class:`torch.amp.GradScaler` that scales the loss, or None."""
        return self._grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ValueError(f"grad_scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
        self._grad_scaler = scaler

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Makes a scaler call step() even if it is to be skipped, so that the captures are dropped."""
        return True

    def _loss_scale(self) -> Tensor | None:
        """What the gradients of the captured outputs are too large by; None: 1.

        Without ``grad_scaler`` it is known only while a scaler runs the step.
        """
        if self.grad_scaler is None:
            return getattr(self, "grad_scale", None)
        if not self.grad_scaler.is_enabled():
            return None
        scale: Tensor | None = self.grad_scaler._get_scale_async()
        return scale

    def _found_inf(self, step: JointStep) -> Tensor | None:
        """The verdict of the scaler that runs this step; unscales ``.grad`` as that would."""
        found_inf = unscale_gradients(self)
        return None if found_inf is None else on_device(found_inf, step.device)

    # ---- groups and modules

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._group_by_param = None
        self._capture.watch(self.param_groups[-1]["params"])

    def _check_new_group(self, index: int, group: dict[str, Any]) -> None:
        super()._check_new_group(index, group)
        self._check_shared([*self.param_groups, group])

    def _adopt(self, modules: dict[nn.Module, str]) -> None:
        for module, name in modules.items():
            self._capture.adopt(module, name)
        self._capture.settle()

    def _check_shared(self, groups: list[dict[str, Any]]) -> None:
        for name in self._OPTIONS.shared:
            first = groups[0][name]
            for index, group in enumerate(groups):
                if group[name] != first:
                    raise ValueError(
                        f"{name} must be the same in all parameter groups of {type(self).__name__}, "
                        f"got {first!r} in group 0 and {group[name]!r} in group {index}"
                    )

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        if self._group_by_param is None:
            self._group_by_param = {
                p: group for group in self.param_groups for p in group["params"]
            }
        return self._group_by_param[param]

    def _full_name(self, param: Tensor) -> str:
        index = next(i for i, g in enumerate(self.param_groups) if g is self._group_of(param))
        return parameter_name(index, self.param_groups[index], param)

    def _short_name(self, param: Tensor) -> str:
        index = next(i for i, g in enumerate(self.param_groups) if g is self._group_of(param))
        return short_name(index, self.param_groups[index], param)

    def _module_name(self, module: nn.Module) -> str:
        name = self._capture.modules.get(module, "")
        kind = type(module).__name__
        return f"layer {name!r} ({kind})" if name else f"a layer of type {kind}"

    # ---- the step

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._capture.forget()

    def _step_groups(self) -> None:
        try:
            self._refuse_misuse()
            self._group_by_param = None  # groups are plain dicts that anybody may change
            step = self._joint_step()
            if step is not None:
                self._check_old_state(step)
                self._convert_state(step)
                refuse_capture(step.device, "the host decides in step() what is captured")
                self._known_host_steps([p for p in step.params if self._has_state(p)])
                self._step_joint(step)
        finally:
            self._capture.forget()
            self._capture.settle()

    def _refuse_misuse(self) -> None:
        name = type(self).__name__
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            ranks = distributed.get_world_size()
            if ranks > 1:
                raise RuntimeError(
                    f"{name} does not combine what {ranks} processes capture yet, so that their "
                    "parameters would drift apart; train in one process"
                )
        found_inf, grad_scale = (getattr(self, k, None) for k in ("found_inf", "grad_scale"))
        is_scaled = isinstance(found_inf, torch.Tensor)
        if is_scaled and grad_scale is None and self.grad_scaler is None:
            raise ValueError(
                f"unscale_() has left this {name} without the scale of what its layers captured: pass "
                "grad_scaler=scaler, or set the attribute grad_scaler of a copy"
            )
        if self._is_copy and not self._capture.ran:
            raise RuntimeError(
                f"this {name} is a copy, and none of its layers has run since: the model that did is "
                "another one. Copy or save model and optimizer together, "
                "as in copy.deepcopy((model, optimizer)), or use state_dict()"
            )
        self._is_copy = False

    def _joint_step(self) -> JointStep | None:
        steps = self._all_arguments()
        self._check_shared(self.param_groups)
        if not steps:
            return None
        devices = sorted({str(step.device) for step in steps})
        if len(devices) > 1:
            raise ValueError(
                f"{type(self).__name__} needs all parameters on one device, got gradients on "
                f"{' and '.join(devices)}; use one optimizer a device"
            )
        return JointStep(
            [p for step in steps for p in step.params],
            [g for step in steps for g in step.grads],
            [step.group for step in steps for _ in step.params],
            steps[0].device,
        )

    def _check_old_state(self, step: JointStep) -> None:
        """Raises ValueError for state that does not fit its parameter, before anything is changed."""
        for param in step.params:
            buffer = self.state.get(param, {}).get("momentum_buffer")
            if buffer is not None and buffer.shape != param.shape:
                raise ValueError(self._misfit(param, f"'momentum_buffer' {list(buffer.shape)}"))
            if not self._has_state(param):
                check_unsharded(param, self._full_name(param))

    def _misfit(self, param: Tensor, state: str) -> str:
        group = self._group_of(param)
        index = next(i for i, g in enumerate(self.param_groups) if g is group)
        return (
            f"{self._full_name(param)} has got another shape since its {state} was made; "
            f"{self._start_afresh(index, group, param)} to start afresh"
        )

    def _convert_state(self, step: JointStep) -> bool:
        """Whether state had to follow its parameter to another device or dtype."""
        moved = [p for p in step.params if self._has_state(p) and not self._is_beside(p)]
        for param in moved:
            state = self.state[param]
            dtypes = dict.fromkeys(self._IN_STATE_DTYPE, state_dtype(param)) | {"step": STEP_DTYPE}
            for key, value in self._own_state(param).items():
                state[key] = value.to(param.device, dtypes.get(key, value.dtype))
        return bool(moved)

    def _is_beside(self, param: Tensor) -> bool:
        """Whether the state of the parameter has its device and the dtypes that it needs."""
        state = self.state[param]
        step, dtype = state["step"], state_dtype(param)
        return (step.device, step.dtype) == (param.device, STEP_DTYPE) and all(
            state[key].dtype == dtype for key in self._IN_STATE_DTYPE & state.keys()
        )

    def _own_state(self, param: Tensor) -> State:
        """State of the parameter on its device, without what other code may keep there."""
        own = {"step", *self._IN_STATE_DTYPE}
        return {k: v for k, v in self.state[param].items() if k in own}

    def _add_common_state(self, step: JointStep, with_buffer: Iterable[bool]) -> None:
        """Makes the state that parameters lack for this step."""
        for param, needs_buffer in zip(step.params, with_buffer, strict=True):
            if not self._has_state(param):
                self.state[param]["step"] = fresh_step(param)
                self._host_steps[param] = 0
            if needs_buffer and "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = state_zeros(param)

    def _count_step(self, step: JointStep) -> None:
        """Takes note of a launched step."""
        for param, count in zip(step.params, self._known_host_steps(step.params), strict=True):
            self._host_steps[param] = count + 1
        self._monitor.watch((JOINT, step.device), step.params)

    def _status(self, step: JointStep) -> Tensor:
        return self._monitor.status((JOINT, step.device))

    def _host_step(self, param: Tensor) -> int:
        return self._known_host_steps([param])[0] if self._has_state(param) else 0

    # ---- state

    def _check_saved_groups(self, state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        for index, group in enumerate(state_dict["param_groups"]):
            if self._OWN_OPTION not in group:
                raise ValueError(
                    f"state_dict is not one of {type(self).__name__}: {self._OWN_OPTION!r} is missing "
                    f"from parameter group {index}"
                )
        self._check_shared(groups)

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._group_by_param = None
        self._capture.forget()

    def __getstate__(self) -> dict[str, Any]:
        # Hooks are made anew, and a scaler is not taken along: a copy of it would stand still.
        return {**super().__getstate__(), "modules": dict(self._capture.modules)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        modules = state.pop("modules")
        self.grad_scaler = None
        self._init_capture()
        super().__setstate__(state)
        for group in self.param_groups:
            self._capture.watch(group["params"])
        self._adopt(modules)
        self._is_copy = bool(modules)


def all_zero(tensors: list[Tensor]) -> bool:
    """Whether all entries are zero; waits for the device."""
    return not any(bool(t.any()) for t in tensors)
