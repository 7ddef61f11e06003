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
    """Divides all gradients by the scale; returns what is not 0 if the step is to be skipped.

    None without a scaler. Waits for no device.
    """
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
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
            torch._foreach_mul_(tensors, inverse.to(device, non_blocking=True))
    return found_inf
