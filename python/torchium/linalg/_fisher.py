"""The Fisher matrix of a model, as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._reentrant import refuse_reentrant_checkpoints
from ._arguments import check_callable, checked_params
from ._operators import LinearOperator, of_handle

_ops = torch.ops.torchium

_KINDS = ("empirical", "ggn")


def fisher_operator(
    loss_fn: Callable[[], Tensor | tuple[Tensor, Tensor]],
    params: Iterable[Tensor],
    *,
    fisher: str = "empirical",
) -> LinearOperator:
    """Return the Fisher matrix of N samples, as an operator on the concatenated parameters.

    - ``"empirical"``: ``F = (1/N) sum_n g_n g_n^T``, ``g_n`` the gradient of the loss of sample n.
    - ``"ggn"``: ``F = (1/N) sum_n J_n^T H_n J_n``, the generalised Gauss-Newton matrix: ``J_n`` is
      the Jacobian of the outputs of sample n and ``H_n`` the Hessian of its loss with respect to
      these. For cross-entropy and squared error it is the Fisher matrix (Martens 2020, "New insights
      and perspectives on the natural gradient method", section 9).

    The loss is evaluated once, here. A product is a derivative of ``J^T u`` with respect to ``u``,
    which is ``J v``, and one backward pass, each for all columns together (``torch.func.vmap``); no
    gradient of a sample is formed. The matrix is that of the parameters' values now; they must not
    change in place before the last product.

    Args:
        loss_fn: returns the losses of the samples, ``[N]`` (``reduction="none"``); with
            ``fisher="ggn"`` a pair of these and the outputs ``[N, ...]`` that they are computed from,
            sample by sample. Every operation needs a second derivative, and what ``torch.func.vmap``
            cannot batch needs ``block_size=1``, as for :func:`hvp_operator`.
        params: parameters of one dtype, float32 or float64, and one device. Entry ``i`` of a vector
            belongs to entry ``i`` of ``torch.cat([p.flatten() for p in params])``.
        fisher: ``"empirical"`` or ``"ggn"``.

    Returns:
        An operator of order P, the number of entries of all parameters, declared positive
        semidefinite. It keeps the graph of the losses.

    Raises:
        ValueError: no parameters, a parameter that is there twice or does not require gradients, mixed
            dtypes or devices, another ``fisher``, or losses and outputs of another shape, without a
            graph, independent of the parameters or of each other, or with a reentrant checkpoint in their
            graph (``use_reentrant=False`` works).

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> def losses():
        ...     z = model(x)
        ...     return torch.nn.functional.cross_entropy(z, y, reduction="none"), z
        >>> F = torchium.linalg.fisher_operator(losses, model.parameters(), fisher="ggn")
        >>> torchium.linalg.lanczos(F, 1).eigenvalues.shape
        torch.Size([1])
    """
    if fisher not in _KINDS:
        raise ValueError(f'fisher_operator: fisher is {fisher!r}; it must be "empirical" or "ggn"')
    check_callable("fisher_operator", "loss_fn", loss_fn)
    parameters = checked_params("fisher_operator", params)
    with torch.enable_grad():
        found = loss_fn()
    results: Any = found if fisher == "ggn" else (found, found)
    if not (isinstance(results, tuple) and [isinstance(x, Tensor) for x in results] == [True] * 2):
        pair = 'a pair of losses and outputs with fisher="ggn"'
        losses = 'the losses of N samples, a tensor [N]; use reduction="none"'
        wanted = pair if fisher == "ggn" else losses
        raise ValueError(f"fisher_operator: loss_fn must return {wanted}")
    refuse_reentrant_checkpoints("fisher_operator", *results)
    return of_handle(_ops.fisher_operator(*results, parameters, fisher))
