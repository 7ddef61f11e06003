"""Operators and their functions agree with those of cola-ml on random matrices."""

from __future__ import annotations

import cola
import pytest
import torch
from operator_cases import circulant, randn, regular, spd
from torchium import linalg

AUTO = cola.linalg.Auto()
PERM = torch.tensor([2, 0, 1, 3, 5, 4])


def sparse_of_cola(A: torch.Tensor) -> cola.ops.LinearOperator:
    rows, columns = A.nonzero(as_tuple=True)
    operator = cola.ops.Sparse(A[rows, columns], rows, columns, tuple(A.shape))
    operator.A = A.to_sparse_csr()  # it confuses the entries of a row: its sort is not stable
    return operator


def pairs(seed: int) -> dict[str, tuple[linalg.LinearOperator, cola.ops.LinearOperator]]:
    """Of the same structure in both packages."""
    A, B, S = regular(2, seed), regular(3, seed + 1), spd(6, seed)
    d = randn(6, seed=seed).abs() + 0.5
    T = (regular(6, seed) + torch.eye(6)).tril()
    dense, ops = cola.ops.Dense, cola.ops
    definite = linalg.Dense(S).assume("positive_definite")
    kernel = torch.tensor([2.0, 0.3, -0.2], dtype=torch.float64) + 0.1 * randn(3, seed=seed)
    U, V = 0.3 * randn(6, 2, seed=seed + 2), 0.3 * randn(6, 2, seed=seed + 3)
    sparse = regular(6, seed)
    sparse[(randn(6, 6, seed=seed) > 0) & ~torch.eye(6, dtype=torch.bool)] = 0
    return {
        "Dense": (linalg.Dense(S), dense(S)),
        "positive definite": (definite, cola.PSD(dense(S))),
        "Diagonal": (linalg.Diagonal(d), ops.Diagonal(d)),
        "Triangular": (linalg.Triangular(T), ops.Triangular(T)),
        "Permutation": (
            linalg.Permutation(PERM, dtype=torch.float64),
            ops.Permutation(PERM, torch.float64),
        ),
        "Kronecker": (linalg.Kronecker(A, B), ops.Kronecker(dense(A), dense(B))),
        "BlockDiag": (linalg.BlockDiag(A, B), ops.BlockDiag(dense(A), dense(B))),
        "Product": (linalg.Product(S, linalg.Triangular(T)), ops.Product(dense(S), ops.Triangular(T))),
        "Sum": (linalg.Sum(S, linalg.Diagonal(d)), ops.Sum(dense(S), ops.Diagonal(d))),
        "Sparse": (
            linalg.Sparse(sparse.to_sparse()),
            sparse_of_cola(sparse),
        ),
        # cola-ml's convolution is not periodic, and needs JAX.
        "Convolution": (linalg.Convolution(kernel, [6]), dense(circulant(kernel, 6))),
        "LowRankPlusDiagonal": (
            linalg.LowRankPlusDiagonal(d, U, V),
            ops.Sum(ops.Product(dense(U), dense(V.T)), ops.Diagonal(d)),
        ),
        "nested": (
            linalg.BlockDiag(linalg.Kronecker(A, linalg.Diagonal(d)), S),
            ops.BlockDiag(ops.Kronecker(dense(A), ops.Diagonal(d)), dense(S)),
        ),
    }  # fmt: skip


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", pairs(0))
def test_both_agree(kind, seed):
    mine, theirs = pairs(seed)[kind]
    X = randn(len(mine), 2, seed=seed)
    close(mine.to_dense(), theirs.to_dense())
    close(mine @ X, theirs @ X)
    if kind != "Sparse":  # cola-ml 0.0.7 does not transpose these
        close(mine.T @ X, theirs.T @ X)
    close(mine.solve(X), cola.inv(theirs) @ X)
    close(mine.diag(), cola.diag(theirs, 0, cola.linalg.Exact()))
    close(mine.trace(), cola.trace(theirs, cola.linalg.Exact()))
    sign, logabsdet = cola.linalg.slogdet(theirs, AUTO, AUTO)
    found = mine.slogdet()
    if kind != "Permutation":  # cola-ml 0.0.7 has +1 for the odd permutation
        close(found[0], torch.as_tensor(sign).to(found[0]).reshape(()))
    close(found[1], torch.as_tensor(logabsdet).to(found[1]).reshape(()))


# Those that cola-ml computes by eigenvectors are complex.
FUNCTIONS = {
    "inverse": (lambda A: A.inverse(), cola.inv),
    "exp": (lambda A: A.exp(), cola.exp),
    "sqrt": (lambda A: A.sqrt(), cola.sqrt),
    "pow": (lambda A: A.pow(0.3), lambda A: cola.pow(A, 0.3)),
    "square": (lambda A: A.pow(2), lambda A: cola.pow(A, 2)),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", pairs(0))
def test_functions_agree(kind, function, seed):
    if kind == "Permutation" and function in ("sqrt", "pow"):
        pytest.skip("an odd permutation has the eigenvalue -1")
    mine, theirs = pairs(seed)[kind]
    ours, of_cola = FUNCTIONS[function]
    image = of_cola(theirs)
    X = randn(len(mine), 2, seed=seed)
    expected = image @ X.to(image.dtype)
    close(ours(mine) @ X, expected.real if expected.is_complex() else expected)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", pairs(0))
def test_determinants_and_eigenvalues_agree(kind, seed):
    mine, theirs = pairs(seed)[kind]
    logabsdet = cola.linalg.slogdet(theirs, AUTO, AUTO)[1]
    close(mine.det().abs(), torch.as_tensor(logabsdet).exp().reshape(()).to(torch.float64))
    expected = cola.eig(theirs, len(mine), "LM", cola.linalg.Eig())[0].to(torch.complex128)
    values, vectors = mine.eigs()
    distances = (values[:, None] - expected).abs()  # in any order
    assert max(distances.amin(0).max(), distances.amin(1).max()) <= 1e-8
    V = vectors.to(torch.complex128)
    close(mine.to_dense().to(V) @ V, V * values)
