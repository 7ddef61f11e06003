"""Gradients of the loss of each sample, by one backward pass per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


def per_sample_gradients(
    model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Any, targets: Any
) -> dict[str, Tensor]:
    """Name -> [batch, *shape]: the gradient of loss_fn(model(inputs[i:i+1]), targets[i:i+1])."""
    names, parameters = zip(
        *[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True
    )
    rows = []
    for i in range(len(next(t for t in tree_leaves(inputs) if isinstance(t, Tensor)))):
        loss = loss_fn(call(model, sample(inputs, i)), sample(targets, i))
        if not loss.requires_grad:
            rows.append([torch.zeros_like(p) for p in parameters])
            continue
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        rows.append([g.to_dense() if g.is_sparse else g for g in gradients])
    return {n: torch.stack(r) for n, r in zip(names, zip(*rows, strict=True), strict=True)}


def sample(batch: Any, i: int) -> Any:
    return tree_map(lambda t: t[i : i + 1] if isinstance(t, Tensor) else t, batch)


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
