"""Roots, powers and eigenvalues of symmetric matrices, batched over leading dimensions.

Each takes one batch ``[..., n, n]``, or a list or tuple of batches of mixed orders, dtypes and
devices, for which it returns lists. Matrices of equal order, dtype and device are solved together,
without a launch per matrix; their results are views of one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from ._arguments import (
    check_integer,
    check_matrices,
    check_numbers,
    check_string,
)

_ops = torch.ops.torchium


class InverseRootInfo(NamedTuple):
    """Accuracy of an inverse root; every tensor has the leading dimensions of ``A``."""

    #: ``|D X^p D - D|_F / |D|_F`` with ``D`` the damped matrix and ``X`` the root.
    residual: Tensor
    #: Steps of the coupled iteration, int64; 0 for ``eigh``.
    iterations: Tensor
    #: Smaller eigenvalues of the damped matrix count as this value.
    floor: Tensor


@overload
def matrix_inverse_root(
    A: Tensor,
    root: int,
    *,
    eps: float = 0.0,
    relative_eps: float = 0.0,
    method: str = "auto",
    return_info: Literal[False] = False,
) -> Tensor: ...


@overload
def matrix_inverse_root(
    A: Tensor,
    root: int,
    *,
    eps: float = 0.0,
    relative_eps: float = 0.0,
    method: str = "auto",
    return_info: Literal[True],
) -> tuple[Tensor, InverseRootInfo]: ...


@overload
def matrix_inverse_root(
    A: Sequence[Tensor],
    root: int,
    *,
    eps: float = 0.0,
    relative_eps: float = 0.0,
    method: str = "auto",
    return_info: Literal[False] = False,
) -> list[Tensor]: ...


@overload
def matrix_inverse_root(
    A: Sequence[Tensor],
    root: int,
    *,
    eps: float = 0.0,
    relative_eps: float = 0.0,
    method: str = "auto",
    return_info: Literal[True],
) -> tuple[list[Tensor], list[InverseRootInfo]]: ...


def matrix_inverse_root(
    A: Tensor | Sequence[Tensor],
    root: int,
    *,
    eps: float = 0.0,
    relative_eps: float = 0.0,
    method: str = "auto",
    return_info: bool = False,
) -> (
    Tensor
    | tuple[Tensor, InverseRootInfo]
    | list[Tensor]
    | tuple[list[Tensor], list[InverseRootInfo]]
):
    """Return ``(A + (eps + relative_eps s) I)^(-1/root)``, exactly symmetric.

    ``s`` is the largest eigenvalue for ``"eigh"``, and an upper bound of it for ``"newton"``: the
    smaller of the Frobenius norm and the largest absolute row sum.

    Small eigenvalues of the damped matrix, hidden by rounding errors, count as a floor, which is not
    added to the others. The result is therefore finite for every finite ``A``. With u the machine
    epsilon, the floor is ``(4 + sqrt(n)/4) u`` times the largest eigenvalue for ``"eigh"``. For
    ``"newton"`` it is the damping if that exceeds ``16 u s`` (n up to 128) or ``8 u s``, and about
    ``24 u s`` without damping. It is at least the smallest normal number (64 times that for
    ``"newton"``), so the root of a zero matrix is finite too. Below its floor, ``"newton"`` is
    accurate to a factor of 60 for root 1 (100 on a GPU), 10 for 2, 4.5 for 4, 2 for 8.

    Args:
        A: ``[..., n, n]``, positive semi-definite, float32 or float64; float16 and bfloat16 are
            computed in float32 and saturate. Replaced by ``(A + A^T)/2`` if not symmetric. Or a list
            or tuple of batches of mixed orders, dtypes and devices.
        root: any positive integer.
        eps: damping, finite and not negative.
        relative_eps: damping in units of ``s``, finite and not negative.
        method: ``"eigh"``, eigenvalues and eigenvectors; ``"newton"``, the minimax coupled iteration, which
            uses only matrix products and is more accurate than ``eigh`` if the damping is above its
            floor; or ``"auto"``, the faster of the two. Roots above 256 always use ``eigh``. If the
            iteration fails, because of negative eigenvalues, ``iterations`` is 0. A CPU then uses
            ``eigh``; a GPU, whose results the host does not read, returns a multiple of the
            identity.
        return_info: also return an :class:`InverseRootInfo` (for a list, a list of them); its
            residual costs products in float64.

    Returns:
        ``[..., n, n]`` in the dtype of ``A``; for a list, the list of roots. A matrix with NaN or
        Inf yields NaN and does not affect the others. Not differentiable: use :func:`matrix_power`.

    Raises:
        ValueError: wrong type, dtype, shape, root, damping or method; names the entry of a list.
        RuntimeError: ``A`` requires grad while gradients are recorded, or has a tangent of
            forward-mode differentiation.
    """
    name = "matrix_inverse_root"
    is_one = check_matrices(name, A)
    check_integer(
        name,
        "root",
        root,
        "it must be a positive integer below 2**63. For other exponents use matrix_power.",
    )
    check_numbers(name, eps=eps, relative_eps=relative_eps)
    check_string(name, "method", method, "it must be 'auto', 'eigh' or 'newton'.")
    options = {"eps": eps, "relative_eps": relative_eps, "method": method}
    if is_one:
        if not return_info:
            X: Tensor = _ops.matrix_inverse_root.default(A, root, **options)
            return X
        X, *info = _ops.matrix_inverse_root_info.default(A, root, **options)
        return X, InverseRootInfo(*info)
    if not return_info:
        roots: list[Tensor] = _ops.matrix_inverse_root.list(A, root, **options)
        return roots
    roots, *infos = _ops.matrix_inverse_root_info.list(A, root, **options)
    return roots, [InverseRootInfo(*info) for info in zip(*infos, strict=True)]


@overload
def matrix_power(
    A: Tensor, exponent: float, *, eps: float = 0.0, relative_eps: float = 0.0
) -> Tensor: ...


@overload
def matrix_power(
    A: Sequence[Tensor], exponent: float, *, eps: float = 0.0, relative_eps: float = 0.0
) -> list[Tensor]: ...


def matrix_power(
    A: Tensor | Sequence[Tensor], exponent: float, *, eps: float = 0.0, relative_eps: float = 0.0
) -> Tensor | list[Tensor]:
    """Return ``(A + (eps + relative_eps s) I)^exponent``, exactly symmetric.

    ``s`` is the largest eigenvalue, or zero if that is negative. Integer exponents ``>= 0`` are
    defined for indefinite matrices too. For other exponents ``A`` is assumed positive semi-definite:
    negative eigenvalues count as zero for positive exponents, and as the floor of
    :func:`matrix_inverse_root` for negative ones. The result saturates instead of overflowing.

    Without ``relative_eps`` and where no derivative is recorded, integer exponents up to 16 are
    products, and on a CUDA device ``-1/p``, ``-2/p`` and ``1/2`` are made of one
    :func:`matrix_inverse_root` by ``"newton"``, with its floor. All others take eigenvalues.

    Differentiable once, in reverse and forward mode and under ``torch.func``, also if eigenvalues
    coincide (Daleckii-Krein; Higham 2008, "Functions of Matrices", theorem 3.11). Eigenvalues below
    the floor have no gradient unless the exponent is an integer ``>= 0``.

    Args:
        A: ``[..., n, n]``, as for :func:`matrix_inverse_root`.
        exponent: any finite number.
        eps: damping, finite and not negative.
        relative_eps: damping in units of ``s``, finite and not negative.

    Returns:
        ``[..., n, n]`` in the dtype of ``A``; for a list, the list of powers.

    Raises:
        ValueError: wrong type, dtype, shape, exponent or damping; names the entry of a list.
    """
    is_one = check_matrices("matrix_power", A)
    check_numbers("matrix_power", exponent=exponent, eps=eps, relative_eps=relative_eps)
    operator = _ops.matrix_power.default if is_one else _ops.matrix_power.list
    result: Tensor | list[Tensor] = operator(A, exponent, eps=eps, relative_eps=relative_eps)
    return result


@overload
def eigh(A: Tensor) -> tuple[Tensor, Tensor]: ...


@overload
def eigh(A: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]: ...


def eigh(
    A: Tensor | Sequence[Tensor],
) -> tuple[Tensor, Tensor] | tuple[list[Tensor], list[Tensor]]:
    """Return the eigenvalues, ascending, and the orthonormal eigenvectors of symmetric matrices.

    Like ``torch.linalg.eigh``, but the matrices of a batch are distributed over the cores, or solved
    together on a GPU without a host synchronisation. A matrix with NaN or Inf yields NaN instead of
    an error, and does not affect the others. On a CPU every finite matrix has a finite result, also
    if LAPACK does not converge (:func:`eigh_retries`).

    Args:
        A: ``[..., n, n]``, as for :func:`matrix_inverse_root`.

    Returns:
        Eigenvalues ``[..., n]`` and eigenvectors ``[..., n, n]`` in columns, in the dtype of ``A``.
        For a list, the list of eigenvalues and the list of eigenvectors. Not differentiable: use
        ``torch.linalg.eigh``.

    Raises:
        ValueError: wrong type, dtype or shape; names the entry of a list.
        RuntimeError: ``A`` requires grad while gradients are recorded, or has a tangent of
            forward-mode differentiation.
    """
    is_one = check_matrices("eigh", A)
    operator = _ops.eigh.default if is_one else _ops.eigh.list
    result: tuple[Tensor, Tensor] | tuple[list[Tensor], list[Tensor]] = operator(A)
    return result


def eigh_retries() -> int:
    """Return the number of symmetric matrices in this process that were solved again, on a CPU.

    For some matrices, mostly sparse and of low rank, LAPACK does not converge or is silently wrong.
    Every result is checked. If the check fails, a slower method of the same accuracy solves the
    matrix. The count includes the optimizers' matrices.
    """
    retries: int = _ops.eigh_retries()
    return retries
