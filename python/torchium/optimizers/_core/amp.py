"""The part of a ``torch.amp.GradScaler`` in an optimizer with ``_step_supports_amp_scaling``.

During ``step()`` the scaler sets the attributes ``found_inf`` and, unless ``unscale_()`` was called
before, ``grad_scale``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from ..._sharded import local_tensor

Gradients = dict[tuple[torch.device, torch.dtype], list[Tensor]]


class ScaledLoss:
    """Part of an optimizer that needs the factor of the loss, not of the gradients alone."""

    @property
    def grad_scaler(self) -> GradScaler | None:
        """The :class:`torch.amp.GradScaler` that scales the loss, or None."""
        return self._grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ValueError(f"grad_scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
        self._grad_scaler = scaler

    def _loss_scale(self) -> Tensor | None:
        """The factor of the loss; None: 1.

        Without ``grad_scaler`` it is known only while a scaler runs the step.
        """
        if self.grad_scaler is None:
            return getattr(self, "grad_scale", None)
        if not self.grad_scaler.is_enabled():
            return None
        scale: Tensor | None = self.grad_scaler._get_scale_async()
        return scale

    def _has_lost_scale(self) -> bool:
        """Whether ``unscale_()`` was called, so that a scaler that runs the step no longer gives its scale."""
        found_inf = getattr(self, "found_inf", None)
        is_known = getattr(self, "grad_scale", None) is not None or self.grad_scaler is not None
        return isinstance(found_inf, Tensor) and not is_known


@contextmanager
def unscaled_gradients(optimizer: Optimizer) -> Iterator[Tensor | None]:
    """Divides all gradients by the scale; yields a tensor that is not 0 if the step must be skipped.

    None without a scaler. If the step raises, the gradients are multiplied by the scale again (exactly,
    for powers of two). Does not wait for the device.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if not isinstance(found_inf, Tensor):  # 0 if the scaler saw no gradients
        yield None
        return
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is None:
        yield found_inf
        return
    grads = scaled_gradients(optimizer)
    multiply(grads, scale.double().reciprocal().float())
    try:
        yield found_inf
    except BaseException:
        multiply(grads, scale)
        raise


def scaled_gradients(optimizer: Optimizer) -> Gradients:
    grads: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                grad = local_tensor(param.grad)
                grads[grad.device, grad.dtype].append(grad)
    if any(dtype == torch.float16 for _, dtype in grads):
        raise ValueError(
            "gradients in float16 would underflow when they are unscaled; keep the parameters "
            "in float32 under autocast, or train them in bfloat16 without a GradScaler"
        )
    return grads


def multiply(grads: Gradients, factor: Tensor) -> None:
    for (device, _), tensors in grads.items():
        torch._foreach_mul_(tensors, on_device(factor, device))


def found_non_finite(optimizer: Optimizer) -> Tensor | None:
    """Whether a gradient is not finite, as ``unscale_()`` of a scaler finds out; None without gradients."""
    found = [
        torch.stack(torch._foreach_norm(tensors, math.inf)).isfinite().all().logical_not()
        for grads in scaled_gradients(optimizer).values()
        if (tensors := [grad for grad in grads if grad.numel() > 0])
    ]
    if not found:
        return None
    return torch.stack([on_device(each, found[0].device) for each in found]).any().float()


def has_unscaled(scaler: GradScaler, besides: Optimizer) -> bool:
    """Whether the scaler has divided the gradients of another optimizer by its scale since the last step."""
    return any(
        key != id(besides) and state["stage"] is OptState.UNSCALED
        for key, state in scaler._per_optimizer_states.items()
    )


def on_device(scalar: Tensor, device: torch.device) -> Tensor:
    """Copies without a wait unless the host reads the copy."""
    return scalar.to(device, non_blocking=device.type != "cpu")


def forget_scaler(optimizer: Optimizer) -> None:
    """Removes the attributes of a scaler, which itself does so only after a step without an error."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
