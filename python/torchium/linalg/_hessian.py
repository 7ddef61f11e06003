"""The Hessian of a loss, as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .._reentrant import refuse_reentrant_checkpoints
from ._arguments import check_callable
from ._operators import LinearOperator
from ._parameter_derivatives import checked_params, flat_derivative, flat_gradient


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
            dtypes or devices, or a loss that is not a scalar, depends on none of the parameters or has a
            reentrant checkpoint in its graph (``use_reentrant=False`` works).

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> H = torchium.linalg.hvp_operator(
        ...     lambda: torch.nn.functional.mse_loss(model(x), y), model.parameters()
        ... )
        >>> torchium.linalg.lanczos(H, 1).eigenvalues.shape
        torch.Size([1])
    """
    check_callable("hvp_operator", "loss_fn", loss_fn)
    parameters = checked_params("hvp_operator", params)
    with torch.enable_grad():
        loss = loss_fn()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"hvp_operator: loss_fn returns {shape}; it must return a scalar")
        if not loss.requires_grad:
            raise ValueError("hvp_operator: the loss that loss_fn returns has no graph")
        refuse_reentrant_checkpoints("hvp_operator", loss)
        gradient = flat_gradient(loss, parameters, torch.ones_like(loss))
    if gradient is None:
        raise ValueError("hvp_operator: the loss depends on none of params")

    def product(X: Tensor) -> Tensor:
        return flat_derivative(gradient, parameters, X.mT).mT

    H = LinearOperator(len(gradient), product, dtype=gradient.dtype, device=gradient.device)
    return H.assume("symmetric")
