"""Gradients of the loss of each sample, by one backward pass a sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def per_sample_gradients(
    model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """Name -> [batch, *shape]: the gradient of loss_fn(model(inputs[i:i+1]), targets[i:i+1])."""
    names, parameters = zip(
        *[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True
    )
    rows = []
    for i in range(inputs.shape[0]):
        loss = loss_fn(model(inputs[i : i + 1]), targets[i : i + 1])
        rows.append(torch.autograd.grad(loss, parameters, materialize_grads=True))
    return {n: torch.stack(r) for n, r in zip(names, zip(*rows, strict=True), strict=True)}
