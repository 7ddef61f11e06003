"""What a ``torch.amp.GradScaler`` leaves to an optimizer with ``_step_supports_amp_scaling``.

The scaler sets the attributes ``found_inf``, and ``grad_scale`` unless ``unscale_()`` was called
before, for the time of ``step()``.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.optim import Optimizer


def unscale_gradients(optimizer: Optimizer) -> Tensor | None:
    """Divides all gradients by the scale; returns a flag that is not 0 if the step is to be skipped.

    None without a scaler. Waits for no device.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if not isinstance(found_inf, Tensor):  # 0 of a scaler that saw no gradients
        return None
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        grads: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grads[param.grad.device, param.grad.dtype].append(param.grad)
        if any(dtype == torch.float16 for _, dtype in grads):
            raise ValueError(
                "gradients in float16 would underflow when they are unscaled; keep the parameters "
                "in float32 under autocast, or train them in bfloat16 without a GradScaler"
            )
        inverse = scale.double().reciprocal().float()
        for (device, _), tensors in grads.items():
            torch._foreach_mul_(tensors, on_device(inverse, device))
    return found_inf


def on_device(scalar: Tensor, device: torch.device) -> Tensor:
    """The host waits only for what it reads itself."""
    return scalar.to(device, non_blocking=device.type != "cpu")


def forget_scaler(optimizer: Optimizer) -> None:
    """Removes the attributes of a scaler, which does so itself only after a step that returns."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
