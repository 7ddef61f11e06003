"""Derivatives with respect to lists of parameters, as vectors of all their entries."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def checked_params(function: str, params: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(params, Tensor):
        raise ValueError(f"{function}: params is a Tensor; it must be a list of parameters")
    params = list(params)
    for i, p in enumerate(params):
        if not isinstance(p, Tensor):
            raise ValueError(f"{function}: params[{i}] is a {type(p).__name__}, not a Tensor")
    torch.ops.torchium.check_params(function, params)
    return params


def flat_gradient(y: Tensor, params: list[Tensor], weights: Tensor) -> Tensor | None:
    """The gradient of ``(y * weights).sum()``, ``[P]``, with a graph; None if it depends on none."""
    found = torch.autograd.grad(y, params, weights, create_graph=True, allow_unused=True)
    if all(g is None for g in found):
        return None
    parts = [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]
    return torch.cat([part.flatten() for part in parts])


def flat_derivative(y: Tensor, inputs: list[Tensor], rows: Tensor) -> Tensor:
    """The derivatives of ``(y * row).sum()`` for each row, ``[k, number of entries of all inputs]``.

    Zero for inputs that ``y`` does not depend on. The graph is kept.

    Args:
        y: a result of the graph of ``inputs``.
        inputs: tensors of the graph.
        rows: ``[k, *y.shape]``; all k in one backward pass (``torch.func.vmap``), one without vmap.
    """
    sizes = [(rows.shape[0], x.numel()) for x in inputs]
    found: tuple[Tensor | None, ...] = (None,) * len(inputs)
    if y.requires_grad:  # else it is constant in all inputs
        is_batch = rows.shape[0] > 1
        found = torch.autograd.grad(
            y,
            inputs,
            rows.contiguous() if is_batch else rows[0],
            retain_graph=True,
            is_grads_batched=is_batch,
            allow_unused=True,
        )
    parts = [
        rows.new_zeros(size) if x is None else x.reshape(size)
        for x, size in zip(found, sizes, strict=True)
    ]
    return torch.cat(parts, 1)
