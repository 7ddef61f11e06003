"""Trace, diagonal and log-determinant of large matrices, from products with random signs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._arguments import check_integer, check_numbers
from ._operators import LinearOperator, as_operator, run

_ops = torch.ops.torchium


class StochasticEstimate(NamedTuple):
    """An estimate from random samples."""

    value: Tensor  #: ``[]`` float64; ``[n]`` in the operator's dtype for a diagonal
    standard_error: Tensor  #: of the shape of ``value``; NaN for a single sample
    products: int  #: columns that ``A`` has been multiplied by


def hutchinson_trace(
    A: Tensor | LinearOperator,
    *,
    num_samples: int = 100,
    block_size: int | None = None,
    tol: float | None = None,
    seed: int = 0,
) -> StochasticEstimate:
    """Return an estimate of ``tr A = E[z^T A z]`` for random signs z (Hutchinson 1989).

    Its variance is ``2 (|A|_F^2 - |diag A|^2) / num_samples`` for a symmetric A.

    Args:
        A: ``[n, n]``, dense or sparse, or a :class:`LinearOperator`; float32 or float64.
        num_samples: at most.
        block_size: columns per product; by default 10, or of a dense matrix 256, or 100 with ``tol``.
            Many wide products of a large dense float32 matrix run on Hopper's tensor cores at
            float32's own error, if the workspace holds a copy of the matrix.
        tol: stops once the standard error is at most ``tol |value|``. This is tested after every ten
            products, or each of a dense matrix without ``block_size``; the host waits for the device
            then, and never without ``tol``.
        seed: of the signs, which are equal on every device. No global random state changes.

    Raises:
        ValueError: an argument that does not fit.
    """
    return _hutchinson("hutchinson_trace", False, A, num_samples, block_size, tol, seed)


def hutchinson_diagonal(
    A: Tensor | LinearOperator,
    *,
    num_samples: int = 100,
    block_size: int | None = None,
    tol: float | None = None,
    seed: int = 0,
) -> StochasticEstimate:
    """Return an estimate of ``diag A = E[z * A z]`` for random signs z.

    Bekas, Kokiopoulou and Saad 2007, "An estimator for the diagonal of a matrix". Entry i has the
    variance ``(sum_j A_ij^2 - A_ii^2) / num_samples`` for a symmetric A.

    Args:
        tol: stops once ``|standard_error| <= tol |value|``, the norms over all entries.
        A, num_samples, block_size, seed: as for :func:`hutchinson_trace`.

    Raises:
        ValueError: an argument that does not fit.
    """
    return _hutchinson("hutchinson_diagonal", True, A, num_samples, block_size, tol, seed)


def hutchpp(
    A: Tensor | LinearOperator, *, num_products: int = 99, seed: int = 0
) -> StochasticEstimate:
    """Return an estimate of ``tr A`` by Hutch++.

    Exact on the range of ``A S`` for random signs S, Hutchinson's estimate on the complement, a third
    of the products each: for a positive semi-definite A the relative error falls as
    ``1 / num_products`` instead of its square root (Meyer, Musco, Musco and Woodruff 2021, "Hutch++:
    optimal stochastic trace estimation", `arXiv:2010.09649 <https://arxiv.org/abs/2010.09649>`_). The
    standard error is that of the complement.

    Args:
        num_products: columns that A is multiplied by, at least 3.
        A, seed: as for :func:`hutchinson_trace`.

    Raises:
        ValueError: an argument that does not fit.
    """
    _check_integers("hutchpp", num_products=num_products)
    return _sketched(_ops.hutchpp_process, "hutchpp", A, num_products, seed)


def xdiag(
    A: Tensor | LinearOperator, *, num_products: int | None = None, seed: int = 0
) -> StochasticEstimate:
    """Return an estimate of the diagonal of a symmetric matrix by XDiag.

    Every sample is used for the range, and for the complement of the range of the others
    (Epperly, Tropp and Webber 2024, "XTrace: making the most of every sample in stochastic trace
    estimation", `arXiv:2301.07825 <https://arxiv.org/abs/2301.07825>`_). Far more accurate than
    :func:`hutchinson_diagonal` where eigenvalues decay. Samples are not independent, so the standard
    error is too small: by a factor of up to 1.3 where eigenvalues decay, 1.7 where they are equal.

    Args:
        A: symmetric; otherwise as for :func:`hutchinson_trace`.
        num_products: columns that A is multiplied by; even, from 4 to 2 n; by default 100, or 2 n if that
            is less. From n on, n products give the diagonal itself.
        seed: as for :func:`hutchinson_trace`.

    Raises:
        ValueError: an argument that does not fit.
    """
    if num_products is not None:
        _check_integers("xdiag", num_products=num_products)
    return _sketched(_ops.xdiag_process, "xdiag", A, num_products, seed)


def logdet(
    A: Tensor | LinearOperator,
    *,
    num_samples: int = 30,
    num_steps: int = 30,
    block_size: int = 10,
    seed: int = 0,
) -> StochasticEstimate:
    """Return an estimate of ``log det A = tr log A`` for a symmetric positive definite matrix.

    Stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017, "Fast estimation of tr(f(A)) via
    stochastic Lanczos quadrature"): ``z^T log(A) z`` from the eigenvalues of the tridiagonal matrix
    of Lanczos' method that starts from the random signs z. ``standard_error`` does not contain the
    quadrature's error, which falls exponentially with ``num_steps``, slower for a larger condition
    number.

    Args:
        A: symmetric positive definite; otherwise as for :func:`hutchinson_trace`.
        num_samples: random signs z.
        num_steps: of Lanczos' method per sample, at most n. The workspace is
            ``block_size (num_steps + 1) n`` entries.
        block_size, seed: as for :func:`hutchinson_trace`.

    Returns:
        NaN for a matrix that is not positive definite, as far as the samples show.

    Raises:
        ValueError: an argument that does not fit.
    """
    operator = as_operator("logdet", A)
    _check_integers(
        "logdet", num_samples=num_samples, num_steps=num_steps, block_size=block_size, seed=seed
    )
    process = _ops.logdet_process(
        len(operator), num_samples, num_steps, block_size, seed, operator.dtype, operator.device
    )
    return _estimate(process, operator)


def _hutchinson(
    function: str,
    diagonal: bool,
    A: Any,
    num_samples: int,
    block_size: int | None,
    tol: float | None,
    seed: int,
) -> StochasticEstimate:
    operator = as_operator(function, A)
    _check_integers(function, num_samples=num_samples, seed=seed)
    if block_size is not None:
        check_integer(function, "block_size", block_size, "it must be a positive integer, or None.")
    if tol is not None:
        check_numbers(function, tol=tol)
    process = _ops.hutchinson_process(
        diagonal,
        len(operator),
        num_samples,
        block_size,
        tol,
        seed,
        operator.is_dense,
        operator.dtype,
        operator.device,
    )
    return _estimate(process, operator)


def _sketched(
    make: Any, function: str, A: Any, num_products: int | None, seed: int
) -> StochasticEstimate:
    operator = as_operator(function, A)
    _check_integers(function, seed=seed)
    process = make(len(operator), num_products, seed, operator.dtype, operator.device)
    return _estimate(process, operator)


def _check_integers(function: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        check_integer(function, name, value, "it must be an integer below 2**63.")


def _estimate(process: Any, operator: LinearOperator) -> StochasticEstimate:
    value, standard_error = run(process, operator)
    return StochasticEstimate(value, standard_error, process.products())
