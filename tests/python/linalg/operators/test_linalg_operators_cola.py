"""Operators and their functions agree with those of cola-ml on random matrices."""

from __future__ import annotations

import cola
import pytest
import torch
from operator_cases import randn, regular, spd
from torchium import linalg

AUTO = cola.linalg.Auto()
PERM = torch.tensor([2, 0, 1, 3, 5, 4])


def pairs(seed: int) -> dict[str, tuple[linalg.LinearOperator, cola.ops.LinearOperator]]:
    """Of the same structure in both packages."""
    A, B, S = regular(2, seed), regular(3, seed + 1), spd(6, seed)
    d = randn(6, seed=seed).abs() + 0.5
    T = (regular(6, seed) + torch.eye(6)).tril()
    dense, ops = cola.ops.Dense, cola.ops
    definite = linalg.Dense(S).assume("positive_definite")
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
        "nested": (
            linalg.BlockDiag(linalg.Kronecker(A, linalg.Diagonal(d)), S),
            ops.BlockDiag(ops.Kronecker(dense(A), ops.Diagonal(d)), dense(S)),
        ),
    }  # fmt: skip


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", pairs(0))
def test_both_agree(kind, seed):
    mine, theirs = pairs(seed)[kind]
    X = randn(len(mine), 2, seed=seed)
    close(mine.to_dense(), theirs.to_dense())
    close(mine @ X, theirs @ X)
    close(mine.T @ X, theirs.T @ X)
    close(mine.solve(X), cola.inv(theirs) @ X)
    close(mine.diag(), cola.diag(theirs, 0, cola.linalg.Exact()))
    close(mine.trace(), cola.trace(theirs, cola.linalg.Exact()))
    sign, logabsdet = cola.linalg.slogdet(theirs, AUTO, AUTO)
    found = mine.slogdet()
    if kind != "Permutation":  # cola-ml 0.0.7 has +1 for the odd permutation
        close(found[0], torch.as_tensor(sign).to(found[0]).reshape(()))
    close(found[1], torch.as_tensor(logabsdet).to(found[1]).reshape(()))
