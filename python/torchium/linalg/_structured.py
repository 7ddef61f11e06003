"""Matrices with structure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._arguments import check_constant, check_integer, check_tensors, short
from ._operators import LinearOperator, _classes, of_kind

_ops = torch.ops.torchium


@of_kind
class Dense(LinearOperator):
    """A dense matrix, or a batch of them: ``A`` of shape ``[..., n, n]``.

    Raises:
        ValueError: not square, empty, or not float32 or float64.
    """

    def __init__(self, A: Tensor) -> None:
        check_tensors("Dense", A=A)
        self._set(_ops.dense_operator(A), origin=(Dense, (A,)))


@of_kind
class Diagonal(LinearOperator):
    """The diagonal matrix with the diagonal ``d``, ``[..., n]``."""

    def __init__(self, d: Tensor) -> None:
        check_tensors("Diagonal", d=d)
        self._set(_ops.diagonal_operator(d), origin=(Diagonal, (d,)))


@of_kind
class Identity(LinearOperator):
    """``scale`` times the identity of order ``n``."""

    def __init__(
        self,
        n: int,
        scale: float = 1.0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_integer("Identity", "n", n, "it must be a positive integer.")
        check_constant("Identity", "scale", scale, "Use Diagonal(scale.expand(n)).")
        device = torch.empty(0, device=device).device
        make = functools.partial(Identity, dtype=dtype, device=device)
        handle = _ops.identity_operator(n, float(scale), dtype, device)
        self._set(handle, origin=(make, (n, float(scale))))


@of_kind
class Triangular(LinearOperator):
    """The lower or upper triangle of ``A``, ``[..., n, n]``; the other one is not read.

    Its inverse multiplies by substitution.
    """

    def __init__(self, A: Tensor, lower: bool = True) -> None:
        check_tensors("Triangular", A=A)
        self._set(_ops.triangular_operator(A, bool(lower)), origin=(Triangular, (A, lower)))


@of_kind
class Permutation(LinearOperator):
    """``P x = x[perm]``, whose inverse is its transpose.

    Args:
        perm: ``[n]`` int64, every index once; this is tested.
        dtype: of the matrix, whose device is that of ``perm``.
    """

    def __init__(self, perm: Tensor, *, dtype: torch.dtype = torch.float32) -> None:
        check_tensors("Permutation", perm=perm)
        make = functools.partial(Permutation, dtype=dtype)
        self._set(_ops.permutation_operator(perm, dtype), origin=(make, (perm,)))


@of_kind
class Convolution(LinearOperator):
    """A periodic convolution on a grid, ``(C x)_i = sum_j kernel_j x_(i - j mod shape)``.

    It is diagonal in Fourier space: products, inverses and all functions take Fourier transforms of
    O(n log n). ``x`` lists the points of the grid in row-major order; n is the product of ``shape``.

    Args:
        kernel: ``[..., k1, ..., kd]`` with ``ki <= shape[i]`` and index 0 at offset 0.
        shape: of the grid; by default that of ``kernel``, which for one dimension is the first
            column of a circulant matrix.

    Example:
        >>> blur = torch.tensor([0.5, 0.25, 0, 0, 0.25])
        >>> C = torchium.linalg.Convolution(blur)
        >>> C @ torch.tensor([1.0, 0, 0, 0, 0])
        tensor([0.5000, 0.2500, 0.0000, 0.0000, 0.2500])
    """

    def __init__(self, kernel: Tensor, shape: Sequence[int] | None = None) -> None:
        check_tensors("Convolution", kernel=kernel)
        if shape is not None:
            if not isinstance(shape, Sequence):
                raise ValueError(
                    f"Convolution: shape is {short(shape)}; it must be a list of integers"
                )
            for i, size in enumerate(shape):
                check_integer("Convolution", f"shape[{i}]", size, "it must be a positive integer.")
        grid = None if shape is None else list(shape)
        self._set(_ops.convolution_operator(kernel, grid), origin=(Convolution, (kernel, grid)))


@of_kind
class Sparse(LinearOperator):
    """A sparse matrix: ``A`` of shape ``[n, n]``, of COO or CSR layout."""

    def __init__(self, A: Tensor) -> None:
        check_tensors("Sparse", A=A)
        handle = _ops.sparse_operator(A)  # checks A
        origin: Any = (Sparse, (A,))
        if A.layout is torch.sparse_csr and not A.requires_grad:  # torch does not deep-copy it
            origin = (_csr, (A.crow_indices(), A.col_indices(), A.values(), len(A)))
        self._set(handle, origin=origin)


def _csr(rows: Tensor, columns: Tensor, values: Tensor, n: int) -> Sparse:
    return Sparse(torch.sparse_csr_tensor(rows, columns, values, (n, n), check_invariants=True))


class _Composite(LinearOperator):
    """Made of operators or matrices."""

    _constructor: str
    _argument: str

    def __init__(self, *operators: Tensor | LinearOperator) -> None:
        kind = type(self).__name__
        parts = [_part(kind, f"{self._argument}[{i}]", A) for i, A in enumerate(operators)]
        handle = getattr(_ops, self._constructor)([A._handle for A in parts])
        products = frozenset().union(*(A._products for A in parts))
        self._set(handle, products, (_classes[handle.kind()], tuple(parts)))


def _part(kind: str, name: str, A: Any) -> LinearOperator:
    if isinstance(A, LinearOperator):
        return A
    check_tensors(kind, **{name: A})
    return Dense(A) if A.layout is torch.strided else Sparse(A)


@of_kind
class Product(_Composite):
    """``factors[0] @ factors[1] @ ...``: operators or matrices."""

    _constructor, _argument = "product_operator", "factors"


@of_kind
class Sum(_Composite):
    """``terms[0] + terms[1] + ...``: operators or matrices.

    Functions of ``A + c I`` follow from the eigenvectors of a symmetric ``A``, whose own structure
    is used. ``c I`` is ``Identity(n, c)``, or ``Diagonal(c.expand(n))`` for a tensor with a
    derivative.
    """

    _constructor, _argument = "sum_operator", "terms"


@of_kind
class Kronecker(_Composite):
    """The Kronecker product of ``factors``: operators or matrices.

    Example:
        >>> A = torch.tensor([[2.0, 1], [1, 2]])
        >>> K = torchium.linalg.Kronecker(A, A, A)
        >>> K.inverse()
        Kronecker(n=8, dtype=torch.float32, device='cpu')
        >>> K.det()
        tensor(531441.)
    """

    _constructor, _argument = "kronecker_operator", "factors"


@of_kind
class BlockDiag(_Composite):
    """The block-diagonal matrix of ``blocks``: operators or matrices."""

    _constructor, _argument = "block_diag_operator", "blocks"


@of_kind
class LowRankPlusDiagonal(LinearOperator):
    """``diag(d) + U V^T``.

    Its inverse is of the same kind (Woodbury), and its determinant one of order k (matrix determinant
    lemma), unless entries of ``d`` are zero, or so small next to ``U V^T`` that the formula would lose
    their digits. Determinants of orders above 1000 keep it where ``d`` is small.

    Args:
        d: ``[..., n]``.
        U: ``[..., n, k]``.
        V: ``[..., n, k]``; by default ``U``.
    """

    def __init__(self, d: Tensor, U: Tensor, V: Tensor | None = None) -> None:
        check_tensors("LowRankPlusDiagonal", d=d, U=U)
        if V is not None:
            check_tensors("LowRankPlusDiagonal", V=V)
        self._set(
            _ops.low_rank_plus_diagonal_operator(d, U, V), origin=(LowRankPlusDiagonal, (d, U, V))
        )
