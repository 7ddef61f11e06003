"""Square matrices that are known by their products."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.torchium


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
        self.is_dense = False  # True: made from a dense matrix
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
    if A.layout != torch.strided:
        return LinearOperator(len(A), lambda X: A @ X, dtype=A.dtype, device=A.device)
    operator = LinearOperator(
        len(A), lambda X: _ops._dense_product(A, X), dtype=A.dtype, device=A.device
    )
    operator.is_dense = True
    return operator


def run(process: Any, A: LinearOperator) -> list[Tensor]:
    """The result of an algorithm that asks for products with an operator."""
    with torch.no_grad():
        while (X := process.operand()) is not None:
            process.accept(A @ X)
    result: list[Tensor] = process.result()
    return result


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

    return LinearOperator(len(gradient), product, dtype=gradient.dtype, device=gradient.device)
