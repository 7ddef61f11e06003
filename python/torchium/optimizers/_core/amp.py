"""The part of a ``torch.amp.GradScaler`` in an optimizer with ``_step_supports_amp_scaling``.

During ``step()`` the scaler sets the attributes ``found_inf`` and, unless ``unscale_()`` was called
before, ``grad_scale``.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.optim import Optimizer


def unscale_gradients(optimizer: Optimizer) -> Tensor | None:
    """Divides all gradients by the scale; returns a tensor that is not 0 if the step must be skipped.

    None without a scaler. Does not wait for the device.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if not isinstance(found_inf, Tensor):  # 0 if the scaler saw no gradients
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
    """Copies without a wait unless the host reads the copy."""
    return scalar.to(device, non_blocking=device.type != "cpu")


def forget_scaler(optimizer: Optimizer) -> None:
    """Removes the attributes of a scaler, which itself does so only after a step without an error."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
