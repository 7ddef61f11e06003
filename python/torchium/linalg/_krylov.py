"""Some eigenpairs of large matrices that are known by their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._arguments import check_integer, check_numbers, check_string, check_tensors
from ._operators import LinearOperator, as_operator, run

_ops = torch.ops.torchium


class KrylovEigenpairs(NamedTuple):
    """The result of :func:`lanczos` and :func:`arnoldi`."""

    eigenvalues: Tensor  #: ``[k]``, the most wanted first; complex for :func:`arnoldi`
    eigenvectors: Tensor  #: ``[n, k]``, columns of norm 1
    residual_norms: Tensor  #: ``[k]``: ``|A x - lambda x|``
    converged: Tensor  #: ``[k]``, bool
    products: int  #: columns that ``A`` has been multiplied by


def lanczos(
    A: Tensor | LinearOperator | Callable[[Tensor], Tensor],
    k: int | None = None,
    *,
    n: int | None = None,
    which: str = "LA",
    block_size: int | None = None,
    max_basis: int | None = None,
    max_restarts: int = 100,
    tol: float | None = None,
    start: Tensor | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KrylovEigenpairs:
    """Return ``k`` eigenpairs of a symmetric matrix, by Lanczos' method with thick restarts.

    An orthonormal basis ``V`` of a Krylov space is built with full re-orthogonalisation; the small
    problem ``H = V^T A V`` is solved in float64 on the host; then the method restarts from the best
    part of the space (Wu and Simon 2000, "Thick-restart Lanczos method for large symmetric eigenvalue
    problems"). It also stops in between, as soon as the residuals allow it. On a GPU the host waits
    a few times per restart, not once per product. A matrix of an order not above
    ``max_basis + block_size`` is formed and solved densely. Of a dense float32 matrix of order 6144 or
    more on a Hopper GPU all products but the first read one triangle only.

    Args:
        A: ``[n, n]``, dense or sparse, or a :class:`LinearOperator`; symmetric, float32 or float64. Or
            the function ``product`` of ``LinearOperator(n, product)``.
        k: the number of eigenpairs, from 1 to n; by default 6, or n if that is less.
        n: the order, of a function alone; by default the length of ``start``.
        which: ``"LA"`` (largest), ``"SA"`` (smallest) or ``"LM"`` (largest magnitude).
        block_size: columns per product. A matrix with eigenvalues of multiplicity m needs
            ``block_size >= m`` to find all of them reliably. By default that of ``start``, or 8 for a
            dense float32 matrix on a GPU, which reads it no slower than for one column, otherwise 1.
        max_basis: columns of V, at least ``k + 2 block_size``; by default
            ``max(2 k + 1, 20, 10 block_size) + 2 block_size``.
        max_restarts: after these a warning names the number of pairs that have not converged.
        tol: an eigenpair has converged if ``|A x - lambda x| <= tol max |lambda|``; by default
            ``finfo(dtype).eps ** (2 / 3)``. With 0 the method ends once the residuals are rounding
            errors, below ``100 finfo(dtype).eps max |lambda|`` and those of the restarts, and no longer
            fall.
        start: ``[n]`` or ``[n, block_size]``; by default random signs.
        seed: of the random signs, which are equal on every device. No global random state changes.
        dtype, device: of a function alone; by default those of ``start``, else float32 on the CPU.

    Returns:
        :class:`KrylovEigenpairs`, real. Not differentiable.

    Raises:
        ValueError: an argument that does not fit, a product that is not finite, or a matrix that is
            not symmetric.
    """
    A = _operator("lanczos", A, n, start, dtype, device)
    return _eigenpairs(True, A, k, which, block_size, max_basis, max_restarts, tol, start, seed)


def arnoldi(
    A: Tensor | LinearOperator | Callable[[Tensor], Tensor],
    k: int | None = None,
    *,
    n: int | None = None,
    which: str = "LM",
    block_size: int | None = None,
    max_basis: int | None = None,
    max_restarts: int = 100,
    tol: float | None = None,
    start: Tensor | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KrylovEigenpairs:
    """Return ``k`` eigenpairs of a real square matrix, by Arnoldi's method with thick restarts.

    As :func:`lanczos` for matrices that are not symmetric (Stewart 2002, "A Krylov-Schur algorithm
    for large eigenproblems"). Complex eigenvalues come in conjugate pairs, of which the last may be
    cut off. Near a defective eigenvalue the restart adds an error, which ``residual_norms`` contain: it
    can keep a pair from converging, whose remedy is a larger ``max_basis`` or ``tol``.

    Args:
        A: ``[n, n]``, dense or sparse, or a :class:`LinearOperator`; float32 or float64. Or the function
            ``product`` of ``LinearOperator(n, product)``.
        which: ``"LM"`` (largest magnitude), ``"LR"``, ``"SR"`` (largest and smallest real part) or
            ``"LI"`` (largest magnitude of the imaginary part).
        k, n, block_size, max_basis, max_restarts, tol, start, seed, dtype, device: as for
            :func:`lanczos`.

    Returns:
        :class:`KrylovEigenpairs`, complex. Not differentiable.

    Raises:
        ValueError: an argument that does not fit, or a product that is not finite.
    """
    A = _operator("arnoldi", A, n, start, dtype, device)
    return _eigenpairs(False, A, k, which, block_size, max_basis, max_restarts, tol, start, seed)


def _operator(
    function: str,
    A: Any,
    n: int | None,
    start: Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> LinearOperator:
    """The matrix, or the function with its order, dtype and device, as an operator."""
    if isinstance(A, (Tensor, LinearOperator)) or not callable(A):
        for name, value in (("n", n), ("dtype", dtype), ("device", device)):
            if value is not None:
                raise ValueError(
                    f"{function}: {name} is {value}, but A has its own; leave {name} out. It is for "
                    "functions"
                )
        return as_operator(function, A)
    if start is not None:
        check_tensors(function, start=start)
        n = len(start) if n is None and start.dim() > 0 else n
        dtype, device = dtype or start.dtype, device or start.device
    if n is None:
        raise ValueError(
            f"{function}: A is a function, whose order is not known; pass n=, or a "
            "torchium.linalg.LinearOperator(n, product)"
        )
    return LinearOperator(n, A, dtype=dtype or torch.float32, device=device or "cpu")


def _eigenpairs(
    symmetric: bool,
    operator: LinearOperator,
    k: int | None,
    which: str,
    block_size: int | None,
    max_basis: int | None,
    max_restarts: int,
    tol: float | None,
    start: Tensor | None,
    seed: int,
) -> KrylovEigenpairs:
    function = "lanczos" if symmetric else "arnoldi"
    if k is not None:
        check_integer(function, "k", k, "it must be from 1 to n.")
    check_string(function, "which", which, 'it must be a string, as "LM".')
    for name, value in (("block_size", block_size), ("max_basis", max_basis)):
        if value is not None:
            check_integer(function, name, value, "it must be a positive integer, or None.")
    check_integer(function, "max_restarts", max_restarts, "it must be an integer, not negative.")
    if tol is not None:
        check_numbers(function, tol=tol)
    if start is not None:
        check_tensors(function, start=start)
    check_integer(function, "seed", seed, "it must be an integer below 2**63.")
    process = _ops.krylov_process(
        symmetric,
        len(operator),
        k,
        which,
        block_size,
        max_basis,
        max_restarts,
        tol,
        start,
        seed,
        operator.is_dense,
        operator.dtype,
        operator.device,
    )
    values, vectors, residuals, converged = run(process, operator)
    return KrylovEigenpairs(values, vectors, residuals, converged, process.products())
