"""Operators of every class with the dense matrices that they stand for, made without them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from matrix_cases import randn
from torch import Tensor
from torchium import linalg

Case = tuple[linalg.LinearOperator, Tensor]


def regular(n: int, seed: int = 0) -> Tensor:
    """Eigenvalues near 2, so that every function is defined."""
    return 2 * torch.eye(n, dtype=torch.float64) + 0.5 * randn(n, n, seed=seed) / n**0.5


def spd(n: int, seed: int = 0) -> Tensor:
    A = randn(n, n, seed=seed) / n**0.5
    return A @ A.T + 0.5 * torch.eye(n, dtype=torch.float64)


def circulant(kernel: Tensor, n: int) -> Tensor:
    column = torch.zeros(n, dtype=kernel.dtype)
    column[: len(kernel)] = kernel
    return torch.stack([column.roll(j) for j in range(n)], dim=1)


def grid_convolution(kernel: Tensor, shape: tuple[int, int]) -> Tensor:
    columns = []
    for i in range(shape[0]):
        for j in range(shape[1]):
            padded = torch.zeros(shape, dtype=kernel.dtype)
            padded[: kernel.shape[0], : kernel.shape[1]] = kernel
            columns.append(padded.roll((i, j), (0, 1)).flatten())
    return torch.stack(columns, dim=1)


def dense() -> Case:
    return linalg.Dense(regular(6)), regular(6)


def dense_spd() -> Case:
    return linalg.Dense(spd(6)).assume("positive_definite"), spd(6)


def dense_symmetric() -> Case:
    return linalg.Dense(spd(6)).assume("symmetric"), spd(6)


def diagonal() -> Case:
    d = torch.linspace(0.5, 2, 6, dtype=torch.float64)
    return linalg.Diagonal(d), torch.diag(d)


def identity() -> Case:
    return linalg.Identity(6, 1.5, dtype=torch.float64), 1.5 * torch.eye(6, dtype=torch.float64)


def lower() -> Case:
    A = regular(6)
    A.diagonal().copy_(torch.linspace(1, 3, 6))
    return linalg.Triangular(A), A.tril()


def upper() -> Case:
    A = regular(6)
    A.diagonal().copy_(torch.linspace(1, 3, 6))
    return linalg.Triangular(A, lower=False), A.triu()


def permutation() -> Case:
    perm = torch.tensor([2, 0, 1, 3, 5, 4])
    eye = torch.eye(6, dtype=torch.float64)
    return linalg.Permutation(perm, dtype=torch.float64), eye[perm]


def convolution() -> Case:
    kernel = torch.tensor([2.0, 0.3, -0.2], dtype=torch.float64)
    return linalg.Convolution(kernel, [7]), circulant(kernel, 7)


def convolution_of_images() -> Case:
    kernel = torch.tensor([[2.0, 0.3, 0.1], [-0.2, 0.4, 0.2]], dtype=torch.float64)
    return linalg.Convolution(kernel, [3, 4]), grid_convolution(kernel, (3, 4))


def sparse_coo() -> Case:
    A = regular(6) * (randn(6, 6, seed=3).abs() > 0.6) + 2 * torch.eye(6)
    return linalg.Sparse(A.to_sparse()), A


def sparse_csr() -> Case:
    A = regular(6) * (randn(6, 6, seed=4).abs() > 0.6) + 2 * torch.eye(6)
    return linalg.Sparse(A.to_sparse_csr()), A


def callable_operator() -> Case:
    A = regular(6)
    return linalg.LinearOperator(6, lambda X: A @ X, dtype=torch.float64), A


def product() -> Case:
    A, B = regular(6), spd(6, seed=1)
    return linalg.Product(A, linalg.Dense(B)), A @ B


def total() -> Case:
    A, B = regular(6), spd(6, seed=1)
    return linalg.Sum(A, B.to_sparse()), A + B


def shifted() -> Case:
    A, B = spd(2), spd(3, seed=1)
    K = linalg.Kronecker(
        linalg.Dense(A).assume("symmetric"), linalg.Dense(B).assume("positive_definite")
    )
    shift = 0.25 * linalg.Identity(6, dtype=torch.float64)
    return K + shift, torch.kron(A, B) + 0.25 * torch.eye(6)


def scaled() -> Case:
    return 1.5 * linalg.Dense(regular(6)), 1.5 * regular(6)


def kronecker() -> Case:
    A, B = regular(2), regular(3, seed=1)
    return linalg.Kronecker(A, B), torch.kron(A, B)


def kronecker_spd() -> Case:
    parts = [spd(2), spd(3, seed=1), spd(2, seed=2)]
    operators = [linalg.Dense(A).assume("positive_definite") for A in parts]
    return linalg.Kronecker(*operators), torch.kron(torch.kron(*parts[:2]), parts[2])


def block_diag() -> Case:
    A, B = regular(2), spd(3, seed=1)
    d = torch.tensor([1.5, 2.5], dtype=torch.float64)
    return linalg.BlockDiag(A, B, linalg.Diagonal(d)), torch.block_diag(A, B, torch.diag(d))


def low_rank() -> Case:
    d, U = torch.linspace(1, 2, 6, dtype=torch.float64), randn(6, 2) / 3
    return linalg.LowRankPlusDiagonal(d, U), torch.diag(d) + U @ U.T


def low_rank_unsymmetric() -> Case:
    d, U, V = torch.linspace(1, 2, 6, dtype=torch.float64), randn(6, 2) / 3, randn(6, 2, seed=1) / 3
    return linalg.LowRankPlusDiagonal(d, U, V), torch.diag(d) + U @ V.T


CASES: list[Callable[[], Case]] = [
    dense,
    dense_spd,
    dense_symmetric,
    diagonal,
    identity,
    lower,
    upper,
    permutation,
    convolution,
    convolution_of_images,
    sparse_coo,
    sparse_csr,
    callable_operator,
    product,
    total,
    shifted,
    scaled,
    kronecker,
    kronecker_spd,
    block_diag,
    low_rank,
    low_rank_unsymmetric,
]


def principal_power(A: Tensor, exponent: float) -> Tensor:
    """By complex eigenvectors in float64."""
    values, V = torch.linalg.eig(A)
    return (V @ torch.diag(values**exponent) @ torch.linalg.inv(V)).real
