"""Under autocast, operators and iterations compute as without it."""

from __future__ import annotations

import pytest
import torch
from operator_cases import randn
from torchium import linalg

N = 40


def definite() -> torch.Tensor:
    A = randn(N, N).float()
    return A @ A.mT / N + torch.eye(N)


A, B, b = definite(), randn(N, N, seed=1).float(), randn(N, seed=2).float()
OPERATORS = {
    "Dense": lambda: linalg.Dense(A).assume("positive_definite"),
    "Triangular": lambda: linalg.Triangular(A),
    "LowRankPlusDiagonal": lambda: linalg.LowRankPlusDiagonal(A.diagonal(), B[:, :3]),
    "Kronecker": lambda: linalg.Kronecker(A[:5, :5], A[:8, :8]),
    "BlockDiag": lambda: linalg.BlockDiag(A[:10, :10], A[10:, 10:]),
    "Product": lambda: linalg.Product(A, B),
    "LinearOperator": lambda: linalg.LinearOperator(N, lambda X: A @ X),
}
FUNCTIONS = {
    "matmul": lambda A: A @ b,
    "to_dense": lambda A: A.to_dense(),
    "transpose": lambda A: A.T @ b,
    "solve": lambda A: A.solve(b),
    "exp": lambda A: (0.1 * A).exp() @ b,
    "diag": lambda A: A.diag(),
    "logdet": lambda A: A.slogdet()[1],
    "eigs": lambda A: A.eigs(3)[0],
    "cg": lambda A: linalg.cg(A.T @ A, b, tol=1e-3).solution,
    "gmres": lambda A: linalg.gmres(A, b).solution,
    "arnoldi": lambda A: linalg.arnoldi(A, 1, max_basis=20).eigenvalues.abs(),
    "hutchpp": lambda A: linalg.hutchpp(A, num_products=9).value,
    "hutchinson": lambda A: linalg.hutchinson_diagonal(A, num_samples=5).value,
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_autocast_has_no_effect(name, function):
    expected = FUNCTIONS[function](OPERATORS[name]())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = FUNCTIONS[function](OPERATORS[name]())
        assert (A @ b).dtype == torch.bfloat16  # still on
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", [lambda K: linalg.lanczos(K, 2).eigenvalues, linalg.logdet])
def test_symmetric_iterations(function):
    S = randn(200, 200).float()
    S = S @ S.mT / 200 + torch.eye(200)
    K = linalg.LinearOperator(200, lambda X: S @ X)
    expected = function(K)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(function(K), expected)
