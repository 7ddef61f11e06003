"""Linear systems with large matrices that are known by their products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._arguments import check_integer, check_numbers, check_tensors
from ._operators import LinearOperator, as_operator


class SolveResult(NamedTuple):
    """The result of :func:`cg` and :func:`gmres`."""

    solution: Tensor  #: as ``B``
    residual_norms: Tensor  #: ``[m]``, or ``[]`` for a vector: ``|b - A x|``, float64
    converged: Tensor  #: as ``residual_norms``, bool
    iterations: int  #: products with ``A``, of m columns each


def cg(
    A: Tensor | LinearOperator,
    B: Tensor,
    *,
    tol: float | None = None,
    max_iterations: int = 1000,
    preconditioner: Tensor | LinearOperator | None = None,
) -> SolveResult:
    """Return ``A^-1 B`` by conjugate gradients, for a symmetric positive definite matrix.

    Hestenes and Stiefel 1952, "Methods of conjugate gradients for solving linear systems". Each column
    is solved by itself, in units of its largest entry, all with the same products. A column with NaN
    or Inf yields NaN. On a GPU the host waits once in ten iterations. The solution is differentiable in
    reverse mode, by another solve with the transposed matrix.

    Args:
        A: ``[n, n]``, dense or sparse, or a :class:`LinearOperator`; float32 or float64.
        B: ``[n]`` or ``[n, m]``.
        tol: ``|b - A x| <= tol |b|``; by default ``finfo(dtype).eps ** (2 / 3)``.
        max_iterations: after these a warning counts the columns that have not converged.
        preconditioner: close to ``A^-1``, symmetric positive definite.

    Raises:
        ValueError: an argument that does not fit, or ``x^T A x <= 0`` was met.
    """
    return _solve("cg", A, B, tol, max_iterations, preconditioner, None)


def gmres(
    A: Tensor | LinearOperator,
    B: Tensor,
    *,
    tol: float | None = None,
    max_iterations: int = 1000,
    preconditioner: Tensor | LinearOperator | None = None,
    restart: int = 50,
) -> SolveResult:
    """Return ``A^-1 B`` by GMRES.

    Saad and Schultz 1986, "GMRES: a generalized minimal residual algorithm for solving nonsymmetric
    linear systems", preconditioned from the right.

    Args:
        A, B, tol, max_iterations: as for :func:`cg`; A need not be symmetric.
        preconditioner: close to ``A^-1``.
        restart: iterations between restarts; ``restart + 1`` vectors are kept for each column.

    Raises:
        ValueError: an argument that does not fit.
    """
    check_integer("gmres", "restart", restart, "it must be a positive integer.")
    return _solve("gmres", A, B, tol, max_iterations, preconditioner, restart)


def _solve(
    function: str,
    A: Any,
    B: Tensor,
    tol: float | None,
    max_iterations: int,
    preconditioner: Any,
    restart: int | None,
) -> SolveResult:
    check_tensors(function, B=B)
    if tol is not None:
        check_numbers(function, tol=tol)
    check_integer(function, "max_iterations", max_iterations, "it must be a positive integer.")
    operator = as_operator(function, A)
    P = None
    if preconditioner is not None:
        P = as_operator(function, preconditioner, "preconditioner")
    products = operator._products.union(P._products if P else ())
    owner = None
    if products and torch.is_grad_enabled():  # the solution's graph multiplies by them again
        owner = torch.empty(0)
        owner.products = products  # type: ignore[attr-defined]
    handle = P and P._handle
    return SolveResult(
        *operator._handle.solve_iteratively(B, tol, max_iterations, handle, restart, owner)
    )
