"""Square matrices that are known by their products."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LinearOperator:
    """A square matrix that is known by its products.

    Args:
        n: the order.
        product: maps ``X``, ``[n, columns]``, to ``A X``, of the same shape, dtype and device.
        dtype: float32 or float64.
        device: of ``X`` and ``A X``.

    ``A @ X`` takes ``[n]`` or ``[n, columns]``.

    Raises:
        ValueError: an order, dtype or product that does not fit.

    Example:
        >>> D = torch.arange(1.0, 1001.0)
        >>> A = torchium.linalg.LinearOperator(1000, lambda X: D[:, None] * X)
        >>> float(torchium.linalg.hutchinson_trace(A).value)
        500500.0
    """

    def __init__(
        self,
        n: int,
        product: Callable[[Tensor], Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"LinearOperator: n is {n!r}; it must be a positive integer")
        if not callable(product):
            raise ValueError(f"LinearOperator: product is {product!r}; it must be a function of X")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"LinearOperator: dtype is {dtype}; it must be float32 or float64")
        self.shape = torch.Size([n, n])
        self.dtype = dtype
        # The device of tensors: "cuda" is the current one.
        self.device = torch.empty(0, device=device).device
        self._product = product

    def __matmul__(self, X: Tensor) -> Tensor:
        if X.dim() not in (1, 2) or len(X) != len(self):
            raise ValueError(
                f"LinearOperator: X is {tuple(X.shape)}; it must have {len(self)} rows"
            )
        return self._product(X) if X.dim() == 2 else self._product(X.unsqueeze(1)).squeeze(1)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n={len(self)}, dtype={self.dtype}, device='{self.device}')"


def as_operator(function: str, A: Any) -> LinearOperator:
    """``A``, a tensor or an operator, as an operator."""
    if isinstance(A, LinearOperator):
        return A
    if not isinstance(A, Tensor):
        raise ValueError(
            f"{function}: A is of type {type(A).__name__}; it must be a matrix or a "
            "torchium.linalg.LinearOperator, which is made from a function and the order n"
        )
    if A.dim() != 2 or A.shape[0] != A.shape[1]:
        raise ValueError(f"{function}: A is {tuple(A.shape)}; it must be a square matrix")
    if A.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{function}: A is {A.dtype}; it must be float32 or float64")
    return LinearOperator(len(A), lambda X: A @ X, dtype=A.dtype, device=A.device)


def run(process: Any, A: LinearOperator) -> list[Tensor]:
    """The result of an algorithm that asks for products with an operator."""
    with torch.no_grad():
        while (X := process.operand()) is not None:
            process.accept(A @ X)
    result: list[Tensor] = process.result()
    return result


def hvp_operator(loss_fn: Callable[[], Tensor], params: Iterable[Tensor]) -> LinearOperator:
    """Return the Hessian of a loss, as an operator on the concatenated parameters.

    ``H v = d/dp (dL/dp . v)`` (Pearlmutter 1994, "Fast exact multiplication by the Hessian"). The
    loss is evaluated once, here; each product is a backward pass through its gradient, for all
    columns together (``torch.func.vmap``). The Hessian is that of the parameters' values now; they
    must not change in place before the last product.

    Args:
        loss_fn: returns the loss, a scalar that depends on the parameters twice differentiably.
        params: parameters of one dtype, float32 or float64, and one device. Entry ``i`` of a vector
            belongs to entry ``i`` of ``torch.cat([p.flatten() for p in params])``.

    Returns:
        An operator of order P, the number of entries of all parameters. It keeps the graph of the
        loss.

    Raises:
        ValueError: no parameters, mixed dtypes or devices, or a loss that is not a scalar.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> H = torchium.linalg.hvp_operator(
        ...     lambda: torch.nn.functional.mse_loss(model(x), y), model.parameters()
        ... )
        >>> torchium.linalg.lanczos(H, 1).eigenvalues.shape
        torch.Size([1])
    """
    params = list(params)
    if not params:
        raise ValueError("hvp_operator: params is empty")
    if any(p.dtype != params[0].dtype or p.device != params[0].device for p in params):
        raise ValueError("hvp_operator: params must be of one dtype and on one device")
    with torch.enable_grad():
        loss = loss_fn()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("hvp_operator: loss_fn must return a scalar tensor")
        found = torch.autograd.grad(
            loss, params, create_graph=True, allow_unused=True, materialize_grads=True
        )
        gradient = torch.cat([g.flatten() for g in found])

    def product(X: Tensor) -> Tensor:
        if not gradient.requires_grad:  # a loss linear in all parameters
            return torch.zeros_like(X)
        rows = torch.autograd.grad(
            gradient,
            params,
            X.mT.contiguous(),
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
        )
        # None where the gradient does not depend on the parameter.
        parts = [
            X.new_zeros(X.shape[1], p.numel()) if row is None else row.flatten(1)
            for row, p in zip(rows, params, strict=True)
        ]
        return torch.cat(parts, 1).mT

    return LinearOperator(len(gradient), product, dtype=gradient.dtype, device=gradient.device)
