"""The Hessian of a loss, as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ._operators import LinearOperator


def _checked_params(params: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(params, Tensor):
        raise ValueError("hvp_operator: params is a Tensor; it must be a list of parameters")
    params = list(params)
    if not params:
        raise ValueError("hvp_operator: params is empty")
    seen: set[int] = set()
    for i, p in enumerate(params):
        if not isinstance(p, Tensor):
            raise ValueError(f"hvp_operator: params[{i}] is a {type(p).__name__}, not a Tensor")
        if not p.requires_grad:
            raise ValueError(f"hvp_operator: params[{i}] does not require gradients; leave it out")
        if id(p) in seen:
            raise ValueError(f"hvp_operator: params[{i}] is in params twice")
        seen.add(id(p))
    if any(p.dtype != params[0].dtype or p.device != params[0].device for p in params):
        raise ValueError("hvp_operator: params must be of one dtype and on one device")
    return params


def hvp_operator(loss_fn: Callable[[], Tensor], params: Iterable[Tensor]) -> LinearOperator:
    """Return the Hessian of a loss, as an operator on the concatenated parameters.

    ``H v = d/dp (dL/dp . v)`` (Pearlmutter 1994, "Fast exact multiplication by the Hessian"). The
    loss is evaluated once, here; each product is a backward pass through its gradient, for all
    columns together (``torch.func.vmap``). The Hessian is that of the parameters' values now; they
    must not change in place before the last product.

    Args:
        loss_fn: returns the loss, a scalar that depends on the parameters twice differentiably. Every
            operation needs a second derivative: for attention, put
            ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` around the model's call. What
            ``torch.func.vmap`` cannot batch, as ``torch.nn.GroupNorm``, needs ``block_size=1``.
        params: parameters of one dtype, float32 or float64, and one device. Entry ``i`` of a vector
            belongs to entry ``i`` of ``torch.cat([p.flatten() for p in params])``.

    Returns:
        An operator of order P, the number of entries of all parameters. It keeps the graph of the
        loss.

    Raises:
        ValueError: no parameters, a parameter that is there twice or does not require gradients, mixed
            dtypes or devices, or a loss that is not a scalar or depends on none of the parameters.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> H = torchium.linalg.hvp_operator(
        ...     lambda: torch.nn.functional.mse_loss(model(x), y), model.parameters()
        ... )
        >>> torchium.linalg.lanczos(H, 1).eigenvalues.shape
        torch.Size([1])
    """
    params = _checked_params(params)
    with torch.enable_grad():
        loss = loss_fn()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("hvp_operator: loss_fn must return a scalar tensor")
        if not loss.requires_grad:
            raise ValueError("hvp_operator: the loss that loss_fn returns has no graph")
        found = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        if all(g is None for g in found):
            raise ValueError("hvp_operator: the loss depends on none of params")
        gradient = torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).flatten()
                for g, p in zip(found, params, strict=True)
            ]
        )

    def product(X: Tensor) -> Tensor:
        if not gradient.requires_grad:  # a loss linear in all parameters
            return torch.zeros_like(X)
        is_batch = X.shape[1] > 1  # a single column needs no vmap
        rows = torch.autograd.grad(
            gradient,
            params,
            X.mT.contiguous() if is_batch else X[:, 0],
            retain_graph=True,
            is_grads_batched=is_batch,
            allow_unused=True,
        )
        sizes = [(X.shape[1], p.numel()) for p in params]
        # None where the gradient does not depend on the parameter.
        parts = [
            X.new_zeros(size) if row is None else row.reshape(size)
            for row, size in zip(rows, sizes, strict=True)
        ]
        return torch.cat(parts, 1).mT

    H = LinearOperator(len(gradient), product, dtype=gradient.dtype, device=gradient.device)
    return H.assume("symmetric")
