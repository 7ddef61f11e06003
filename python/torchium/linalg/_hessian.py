"""The Hessian of a loss, as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .._reentrant import refuse_reentrant_checkpoints
from ._arguments import check_callable, checked_params
from ._operators import LinearOperator, of_handle

_ops = torch.ops.torchium


def hvp_operator(loss_fn: Callable[[], Tensor], params: Iterable[Tensor]) -> LinearOperator:
    """Return the Hessian of a loss, as an operator on the concatenated parameters.

    ``H v = d/dp (dL/dp . v)`` (Pearlmutter 1994, "Fast exact multiplication by the Hessian"). The
    loss is evaluated once, here; each product is a backward pass through its gradient, for all
    columns together (``torch.func.vmap``), with ``torch.nn.GroupNorm``, which vmap cannot batch, one
    column at a time. The Hessian is that of the parameters' values now; they
    must not change in place before the last product.

    Args:
        loss_fn: returns the loss, a scalar that depends on the parameters twice differentiably. Every
            operation needs a second derivative: for attention, put
            ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` around the model's call. What
            ``torch.func.vmap`` cannot batch otherwise needs ``block_size=1``.
        params: parameters of one dtype, float32 or float64, and one device. Entry ``i`` of a vector
            belongs to entry ``i`` of ``torch.cat([p.flatten() for p in params])``.

    Returns:
        An operator of order P, the number of entries of all parameters. It keeps the graph of the
        loss.

    Raises:
        ValueError: no parameters, a parameter that is there twice or does not require gradients, mixed
            dtypes or devices, or a loss that is not a real scalar, depends on none of the parameters or has a
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
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"hvp_operator: loss_fn returns {type(loss).__name__}; it must return a scalar"
        )
    refuse_reentrant_checkpoints("hvp_operator", loss)
    return of_handle(_ops.hvp_operator(loss, parameters))
