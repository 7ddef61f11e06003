"""Cholesky, polar and singular value decompositions."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._arguments import check_numbers, check_tensors

_ops = torch.ops.torchium


class CholeskyFactor(NamedTuple):
    """The result of :func:`cholesky`."""

    L: Tensor  #: ``[..., n, n]``, lower triangular
    jitter: Tensor  #: ``[...]``, float64: what was added to the diagonal


def cholesky(A: Tensor, *, damping: float = 0.0) -> CholeskyFactor:
    """Return the Cholesky factor: ``L L^T = A + (damping + jitter) I``.

    A matrix that breaks down is tried again with a jitter of 1, then 100 times the rounding error of
    an eigenvalue: ``(4 + sqrt(n) / 4) finfo(dtype).eps`` times the largest entry, at least the
    smallest normal number. If that is not enough, its ``L`` and ``jitter`` are NaN, as for a matrix
    with NaN or Inf. The host reads nothing from a GPU, which factors all matrices three times.
    bfloat16 and float16 are computed in float32.

    Args:
        A: ``[..., n, n]``, floating point; symmetrised.
        damping: finite, not negative.

    Returns:
        :class:`CholeskyFactor`.

    Raises:
        ValueError: a type, shape, dtype or damping that does not fit.
        RuntimeError: ``A`` requires grad while grad mode is on, or has a tangent of forward-mode
            differentiation.
    """
    check_tensors("cholesky", A=A)
    check_numbers("cholesky", damping=damping)
    return CholeskyFactor(*_ops.cholesky(A, damping=damping))


def spd_logdet(A: Tensor, *, damping: float = 0.0) -> Tensor:
    """Return ``log det (A + (damping + jitter) I)``, from the factor of :func:`cholesky`.

    Args:
        A: ``[..., n, n]``, floating point; symmetrised.
        damping: finite, not negative.

    Returns:
        ``[...]``, NaN where the factor is; float32 for bfloat16 and float16.

    Raises:
        ValueError, RuntimeError: as :func:`cholesky`.
    """
    check_tensors("spd_logdet", A=A)
    check_numbers("spd_logdet", damping=damping)
    result: Tensor = _ops.spd_logdet(A, damping=damping)
    return result


def orthogonalize(A: Tensor, *, rcond: float | None = None) -> Tensor:
    """Return ``U V^T`` for ``A = U S V^T``: the orthonormal matrix closest to ``A``.

    Singular values above ``rcond`` times the largest become one, smaller ones a number up to one, also
    zeros that are rounding errors. A matrix with NaN or Inf yields NaN.

    In float32 and 16 bits on a GPU with fast float64 (compute capability 8.0, 9.0 or 10.0) by
    products in float64, without a host wait: 15 steps of three products by default, 7 with
    ``rcond=0.01`` (Polar Express, Amsel et al. 2025, arXiv 2505.16932). Elsewhere by
    ``torch.linalg.svd``.

    Args:
        A: ``[..., m, n]``, floating point.
        rcond: above 0 and below 1; by default, and at least, ``finfo(dtype).eps``, of float32 for
            bfloat16 and float16.

    Returns:
        ``[..., m, n]``.

    Raises:
        ValueError: a type, shape, dtype or ``rcond`` that does not fit.
        RuntimeError: ``A`` requires grad while grad mode is on, or has a tangent of forward-mode
            differentiation.
    """
    check_tensors("orthogonalize", A=A)
    if rcond is not None:
        check_numbers("orthogonalize", rcond=rcond)
    result: Tensor = _ops.orthogonalize(A, rcond=rcond)
    return result


class PolarFactors(NamedTuple):
    """The result of :func:`polar`."""

    U: Tensor  #: ``[..., m, n]``, :func:`orthogonalize` of the matrix
    H: Tensor  #: ``[..., n, n]``, ``V S V^T``, exactly symmetric


def polar(A: Tensor, *, rcond: float | None = None) -> PolarFactors:
    """Return the polar decomposition ``A = U H``.

    Args:
        A, rcond: as for :func:`orthogonalize`, whose errors are these, too.

    Returns:
        :class:`PolarFactors`, in the dtype of ``A``; values beyond its range saturate.

    Raises:
        ValueError, RuntimeError: as :func:`orthogonalize`.
    """
    check_tensors("polar", A=A)
    if rcond is not None:
        check_numbers("polar", rcond=rcond)
    return PolarFactors(*_ops.polar(A, rcond=rcond))


class SingularValues(NamedTuple):
    """The result of :func:`svd`, with ``k = min(m, n)``."""

    U: Tensor  #: ``[..., m, k]``, orthonormal columns
    S: Tensor  #: ``[..., k]``, descending, not negative
    Vh: Tensor  #: ``[..., k, n]``, orthonormal rows


def svd(A: Tensor) -> SingularValues:
    """Return the singular value decomposition ``A = U diag(S) Vh``.

    On a GPU with fast float64 (compute capability 8.0, 9.0 or 10.0), float32 and 16-bit matrices are
    solved all at once, without a host wait, from the polar factor in float64 and the eigenproblem of
    ``H`` (Higham and Papadimitriou 1994). Errors are those of float32 symmetric eigenproblems.
    Measured at ``k = 1024``, in units of ``finfo(float32).eps`` (for ``S`` and ``U S Vh``, times the
    largest singular value): 2 of ``S``, 13 of ``U S Vh``, 8 of ``U^T U`` and ``Vh Vh^T``. All others
    take ``torch.linalg.svd``, whose errors on a GPU are hundreds of times as large.

    Args:
        A: ``[..., m, n]``, floating point. A matrix with NaN or Inf yields NaN.

    Returns:
        :class:`SingularValues`, in the dtype of ``A``; values beyond its range saturate.

    Raises:
        ValueError: a type, shape or dtype that does not fit.
        RuntimeError: ``A`` requires grad while grad mode is on, or has a tangent of forward-mode
            differentiation.
    """
    check_tensors("svd", A=A)
    return SingularValues(*_ops.svd(A))
