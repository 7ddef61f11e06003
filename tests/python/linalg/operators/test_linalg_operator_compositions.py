"""Random compositions of operators, drawn by hypothesis, against dense matrices in float64."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_cases import Case, circulant, randn, regular, spd
from torchium import linalg

SEEDS = st.integers(0, 50)


def leaves(n: int) -> st.SearchStrategy[Case]:
    """Operators of order n, most with eigenvalues of positive real part."""

    def dense(seed: int) -> Case:
        return linalg.Dense(regular(n, seed)), regular(n, seed)

    def definite(seed: int) -> Case:
        return linalg.Dense(spd(n, seed)).assume("positive_definite"), spd(n, seed)

    def diagonal(seed: int) -> Case:
        d = randn(n, seed=seed).abs() + 0.5
        return linalg.Diagonal(d), torch.diag(d)

    def triangular(seed: int) -> Case:
        A = regular(n, seed) + torch.eye(n)
        return linalg.Triangular(A, lower=bool(seed % 2)), A.tril() if seed % 2 else A.triu()

    def permutation(seed: int) -> Case:
        perm = randn(n, seed=seed).argsort()
        return linalg.Permutation(perm, dtype=torch.float64), torch.eye(n, dtype=torch.float64)[
            perm
        ]

    def convolution(seed: int) -> Case:
        kernel = 0.3 * randn(min(n, 3), seed=seed) / n
        kernel[0] = 2
        return linalg.Convolution(kernel, [n]), circulant(kernel, n)

    def low_rank(seed: int) -> Case:
        d, U = randn(n, seed=seed).abs() + 0.5, randn(n, 1, seed=seed + 1)
        return linalg.LowRankPlusDiagonal(d, U), torch.diag(d) + U @ U.T

    def sparse(seed: int) -> Case:
        A = regular(n, seed) * (randn(n, n, seed=seed).abs() > 0.7) + 2 * torch.eye(n)
        return linalg.Sparse(A.to_sparse()), A

    def known_by_products(seed: int) -> Case:
        A = regular(n, seed)
        return linalg.LinearOperator(n, lambda X: A @ X, dtype=torch.float64), A

    makers = [
        dense,
        definite,
        diagonal,
        triangular,
        permutation,
        convolution,
        low_rank,
        sparse,
        known_by_products,
    ]
    return st.builds(lambda make, seed: make(seed), st.sampled_from(makers), SEEDS)


def compositions(n: int, depth: int) -> st.SearchStrategy[Case]:
    if depth == 0 or n == 1:
        return leaves(n)
    inner = compositions(n, depth - 1)
    pairs = st.tuples(inner, inner)

    def split(case) -> Case:
        a, b = case
        return linalg.BlockDiag(a[0], b[0]), torch.block_diag(a[1], b[1])

    def kron(case) -> Case:
        a, b = case
        return linalg.Kronecker(a[0], b[0]), torch.kron(a[1].contiguous(), b[1].contiguous())

    options = [
        inner,
        pairs.map(lambda c: (c[0][0] @ c[1][0], c[0][1] @ c[1][1])),
        pairs.map(lambda c: (c[0][0] + c[1][0], c[0][1] + c[1][1])),
        inner.map(lambda c: (-0.5 * c[0], -0.5 * c[1])),
        inner.map(lambda c: (c[0].T, c[1].T)),
        inner.map(lambda c: (c[0] + 3 * linalg.Identity(n, dtype=torch.float64), c[1] + 3 * torch.eye(n))),
        st.tuples(compositions(n // 2, depth - 1), compositions(n - n // 2, depth - 1)).map(split),
    ]  # fmt: skip
    if n % 2 == 0:
        options.append(
            st.tuples(compositions(2, depth - 1), compositions(n // 2, depth - 1)).map(kron)
        )
    return st.one_of(options)


OPERATORS = st.sampled_from([1, 2, 4, 6]).flatmap(lambda n: compositions(n, 2))


def close(found: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    scale = expected.abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=error * max(scale, 1e-300))


@given(OPERATORS, SEEDS)
def test_products_and_numbers(case, seed):
    operator, A = case
    X = randn(len(A), 3, seed=seed)
    close(operator.to_dense(), A, 1e-12)
    close(operator @ X, A @ X, 1e-11)
    close(operator.T @ X, A.T @ X, 1e-11)
    close(operator.diag(), A.diagonal(), 1e-11)
    scale = A.abs().sum().item()
    torch.testing.assert_close(operator.trace(), A.trace(), rtol=0, atol=1e-12 * scale)
    exponential = torch.linalg.matrix_exp(A)
    close(operator.exp().to_dense(), exponential, 1e-9)
    close((operator**2).to_dense(), A @ A, 1e-11)


@given(OPERATORS, SEEDS)
def test_inverses_and_determinants(case, seed):
    operator, A = case
    X = randn(len(A), 3, seed=seed)
    condition = torch.linalg.cond(A).item()
    if condition > 1e6:
        return
    error = 1e-12 * max(condition, 10)
    close(operator.solve(X), torch.linalg.solve(A, X), error)
    close(operator.inverse().T @ X, torch.linalg.solve(A.T, X), error)
    close((operator**-2) @ X, torch.linalg.matrix_power(A, -2) @ X, error * condition)
    expected_sign, expected = torch.linalg.slogdet(A)
    sign, logabsdet = operator.slogdet()
    assert sign == expected_sign
    torch.testing.assert_close(logabsdet, expected, rtol=1e-9, atol=error * len(A))


@given(OPERATORS)
def test_eigenpairs(case):
    operator, A = case
    values, vectors = operator.eigs(1)
    largest = torch.linalg.eigvals(A).abs().max()
    residual = (A.to(vectors) @ vectors - vectors * values).norm()
    assert residual <= 1e-9 * A.norm()
    # Of defective matrices eigenvalues are accurate to a root of the rounding error.
    torch.testing.assert_close(values.abs()[0], largest, rtol=1e-4, atol=1e-12)
