"""Structured operators where eigenvalues coincide or vanish, columns are zero, or tensors require grad."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from operator_cases import randn, spd
from torch import Tensor
from torchium import linalg
from torchium.linalg import (
    BlockDiag,
    Dense,
    Diagonal,
    Identity,
    Kronecker,
    LinearOperator,
    LowRankPlusDiagonal,
)

LARGE = 1100  # above the order that is solved densely


def large_diagonal(d: Tensor) -> LinearOperator:
    """Known by its products alone."""
    return LinearOperator(len(d), lambda X: d[:, None] * X, dtype=d.dtype)


@pytest.mark.parametrize("symmetric", [True, False])
def test_functions_of_vectors_that_an_operator_maps_to_zero(symmetric):
    d = torch.linspace(1, 2, LARGE, dtype=torch.float64)
    d[0] = 0
    A = large_diagonal(d)
    if symmetric:
        A = A.assume("positive_semidefinite")
    X = torch.zeros(LARGE, 3, dtype=torch.float64)
    X[0, 0] = 1  # A x = 0
    X[:2, 1] = 1  # column 2 is zero
    torch.testing.assert_close(A.exp() @ X, d.exp()[:, None] * X)
    torch.testing.assert_close(A.pow(1.5) @ X, d.pow(1.5)[:, None] * X, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="singular"):
        _ = A.pow(-0.5) @ X[:, 0]
    assert not torch.any(A.sqrt() @ X[:, 0])
    assert not torch.any(A.pow(-0.5) @ X[:, 2])


@pytest.mark.parametrize("d", [[1, 1, 1, 1e-14], [1e-12] * 4, [1e-14, 1, -1e-14, 1]])
@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_diagonal_that_is_small_next_to_the_low_rank(d, columns, symmetric):
    """Woodbury's formula subtracts numbers as large as 1 / d."""
    d = torch.tensor(d, dtype=torch.float64)
    U, V = randn(4, columns, seed=1), randn(4, columns, seed=1 if symmetric else 2)
    A = LowRankPlusDiagonal(d, U) if symmetric else LowRankPlusDiagonal(d, U, V)
    dense, b = A.to_dense(), randn(4, 1, seed=3)
    x = A.solve(b)
    error = (dense @ x - b).norm() / (dense.norm() * x.norm() + b.norm())
    assert error <= 1e-7
    if torch.linalg.cond(dense) < 1e4:
        torch.testing.assert_close(
            A.logdet(), torch.logdet(dense), rtol=1e-9, atol=1e-9, equal_nan=True
        )


def test_woodbury_is_kept_where_it_is_accurate():
    U = 10 * randn(50, 3)
    for noise, error in [(1e-6, 1e-3), (1.0, 1e-10)]:  # condition numbers 1e10 and 1e4
        A = LowRankPlusDiagonal(torch.full((50,), noise, dtype=torch.float64), U)
        assert type(A.inverse()) is LowRankPlusDiagonal
        torch.testing.assert_close(A.inverse() @ (A @ U), U, rtol=error, atol=error)


def test_an_empty_batch_of_low_rank_matrices():
    A = LowRankPlusDiagonal(torch.ones(0, 3), torch.ones(0, 3, 1))
    assert A.solve(torch.ones(3, 2)).shape == (0, 3, 2)
    assert A.logdet().shape == (0,)


def symmetric_matrix(n: int) -> Tensor:
    A = randn(n, n)
    return A + A.mT


def declared_symmetric() -> dict[str, LinearOperator]:
    S, skew = symmetric_matrix(4), torch.tensor([[0.0, 1], [-1, 0]], dtype=torch.float64)
    operators = {
        "BlockDiag": BlockDiag(S, 2 * S),
        "Kronecker": Kronecker(S, S),
        "Kronecker of skew-symmetric factors": Kronecker(skew, skew),
        "Permutation": linalg.Permutation(torch.tensor([1, 0, 3, 2]), dtype=S.dtype),
        "Scaled": 2 * Dense(S),
        "Sum": Dense(S) + Identity(4, dtype=S.dtype),
        "Triangular": linalg.Triangular(torch.diag(torch.arange(4, dtype=S.dtype))),
    }
    return {name: A.assume("symmetric") for name, A in operators.items()}


@pytest.mark.parametrize("name", declared_symmetric())
def test_eigenpairs_are_real_where_a_composition_is_declared_symmetric(name):
    A = declared_symmetric()[name]
    values, vectors = A.eigs(which="LA")
    assert values.dtype == vectors.dtype == torch.float64
    torch.testing.assert_close(values, torch.linalg.eigvalsh(A.to_dense()).flip(0))
    identity = torch.eye(len(A), dtype=torch.float64)
    torch.testing.assert_close(vectors.T @ vectors, identity, rtol=0, atol=1e-12)
    torch.testing.assert_close(A @ vectors, vectors * values)


@pytest.mark.parametrize("name", ["sqrt", "pow", "exp"])
@pytest.mark.parametrize("form", ["Dense", "Sum"])
def test_gradients_of_functions_where_eigenvalues_are_equal(name, form):
    """A covariance matrix with noise: most of its eigenvalues are equal up to rounding."""
    x = torch.linspace(0, 1, 40, dtype=torch.float64)
    left, right = randn(40), randn(40, seed=1)
    identity = torch.eye(40, dtype=torch.float64)

    def value(scale: Tensor) -> Tensor:
        K = torch.exp(-(x[:, None] - x).square() / (2 * scale**2))
        if form == "Dense":
            A = Dense(K + 0.1 * identity)
        else:
            A = Dense(K).assume("symmetric") + 0.1 * Identity(40, dtype=K.dtype)
        A = A.assume("positive_definite")
        image = {"sqrt": A.sqrt, "exp": A.exp, "pow": lambda: A.pow(-0.5)}[name]()
        return left @ (image @ right)

    scale = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(value(scale), scale)
    with torch.no_grad():
        h = 1e-4
        expected = (value(scale + h) - value(scale - h)) / (2 * h)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=0)


def test_gradients_where_all_eigenvalues_are_equal():
    A = (4 * torch.eye(5, dtype=torch.float64)).requires_grad_()
    x, y = randn(5), randn(5, seed=1)
    (gradient,) = torch.autograd.grad(y @ (Dense(A).assume("positive_definite").sqrt() @ x), A)
    symmetric = torch.outer(y, x) + torch.outer(x, y)
    torch.testing.assert_close(gradient, symmetric / 8)  # 1 / (2 sqrt(4))


def test_derived_transposed_products_are_differentiable():
    W = randn(5, 5).requires_grad_()
    X = randn(5, 2, seed=1).requires_grad_()
    A = LinearOperator(5, lambda X: W @ X, dtype=W.dtype)
    seed = randn(5, 2, seed=2)
    found = torch.autograd.grad((A.T @ X * seed).sum(), (W, X))
    expected = torch.autograd.grad((W.T @ X * seed).sum(), (W, X))
    torch.testing.assert_close(found, expected)


def test_iterations_refuse_operators_that_require_grad():
    d = (1 + torch.rand(LARGE, dtype=torch.float64)).requires_grad_()
    shift = torch.eye(LARGE, dtype=torch.float64).roll(1, 0).to_sparse()
    A = linalg.Sparse(0.1 * shift) + Diagonal(d)
    b = randn(LARGE)
    for function in (A.inverse(), A.exp()):
        with pytest.raises(ValueError, match="made of tensors that require grad"):
            _ = function @ b
    with torch.no_grad():
        torch.testing.assert_close(A @ A.solve(b, tol=1e-12), b)


@pytest.mark.parametrize("start", [0.0, float("nan")])
def test_a_column_that_cannot_progress_does_not_stop_the_others(start):
    A = randn(300, 300) / 300**0.5 + 1.3 * torch.eye(300, dtype=torch.float64)
    B = randn(300, 3, seed=1)
    alone = linalg.gmres(A, B[:, 0], restart=20)
    B[:, 1] = start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if start else "error")
        found = linalg.gmres(A, B, restart=20)
    assert alone.iterations > 20
    assert found.converged.tolist() == [True, start == 0, True]


@pytest.mark.filterwarnings("ignore:cg. 2 of 2 columns")
def test_conjugate_gradients_that_are_cut_off_return_the_last_iterate():
    """Their error falls in the norm of A, while the residual may rise above that of zero."""
    d = torch.logspace(0, 6, 400, dtype=torch.float64)
    A = torch.diag(d)
    B = randn(400, 2)
    solution = B / d[:, None]
    before = None
    for iterations in (5, 20, 60):
        found = linalg.cg(A, B, max_iterations=iterations)
        residuals = (B - A @ found.solution).norm(dim=0)
        torch.testing.assert_close(found.residual_norms, residuals)
        error = (d[:, None] * (found.solution - solution).square()).sum(0)
        assert torch.all(error < (before if before is not None else (B * solution).sum(0)))
        before = error
    assert torch.all(residuals > B.norm(dim=0))


def test_products_must_not_change_their_operand():
    x = torch.ones(30)
    A = LinearOperator(30, lambda X: X.mul_(2))
    for use in (lambda: A @ x, lambda: linalg.cg(A, torch.ones(30))):
        with pytest.raises(ValueError, match="changed X in place"):
            use()


def test_estimates_of_factors_are_independent():
    """The product of estimates from the same signs would be larger by their variance."""
    A = randn(30, 30) + 2 * torch.eye(30, dtype=torch.float64)
    operator = LinearOperator(30, lambda X: A @ X, dtype=A.dtype)
    K = Kronecker(operator, operator)
    of_squares = torch.arange(30) * 31  # the entries a_ii^2 of the diagonal of the product
    estimates = torch.stack(
        [K.diag(num_samples=2, seed=seed)[of_squares].mean() for seed in range(300)]
    )
    error = estimates.mean() - A.diagonal().square().mean()
    assert abs(error) <= 4 * estimates.std() / 300**0.5


def test_gmres_of_a_matrix_that_is_not_finite():
    A = torch.eye(20)
    A[3, 4] = float("nan")
    with pytest.raises(ValueError, match="gmres: a product of the operator is not finite"):
        linalg.gmres(A, torch.ones(20))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda c: c * linalg.Identity(3), "Identity: c is "),
        (lambda c: linalg.Dense(torch.eye(3)) / c, "Dense: c is "),
        (lambda c: linalg.Identity(3, c), "Identity: scale is "),
        (lambda c: linalg.Dense(torch.eye(3)) ** c, "pow: exponent is "),
    ],
)
def test_the_derivative_of_a_factor_is_not_lost(make, name):
    message = f"{name}.* without a derivative"
    c = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        make(c)
    with pytest.raises(ValueError, match=message):
        torch.func.grad(lambda c: make(c).trace())(c.detach())
    with pytest.raises(ValueError, match=message):
        torch.func.jvp(lambda c: make(c).trace(), (c.detach(),), (torch.ones(()),))
    with torch.no_grad():
        assert make(c).trace() == make(2.0).trace()
    assert make(c.detach()).trace() == make(2.0).trace()


def test_the_product_of_a_function_that_returns_its_operand_is_a_copy():
    x = torch.ones(3)
    (linalg.LinearOperator(3, lambda X: X) @ x).zero_()
    assert torch.equal(x, torch.ones(3))


def test_python_sums_of_operators():
    pairs = [(spd(2), spd(3)) for _ in range(3)]
    total = sum(linalg.Kronecker(A, B) for A, B in pairs)
    torch.testing.assert_close(total.to_dense(), 3 * torch.kron(spd(2), spd(3)))
    with pytest.raises(TypeError):
        1 + total


def test_arrays_from_the_left_are_named():
    with pytest.raises(ValueError, match=r"Dense: X is .*numpy.ndarray\); it must be a tensor"):
        np.eye(3) @ linalg.Dense(torch.eye(3))


@pytest.mark.parametrize("shape", [5, [5.0], "5"])
def test_the_shape_of_a_grid_is_a_list_of_integers(shape):
    with pytest.raises(ValueError, match="Convolution: shape"):
        linalg.Convolution(torch.ones(3), shape)


@pytest.mark.parametrize("orders", [(3, 4), (30, 40)])
def test_a_multiple_of_the_identity_may_have_a_derivative(orders):
    """The likelihood of a Gaussian process on a grid, as a function of its noise."""
    K = Kronecker(*(Dense(spd(n)).assume("positive_definite") for n in orders))
    y = randn(len(K))

    def likelihood(noise: Tensor) -> Tensor:
        noisy = K + Diagonal(noise.expand(len(K)))
        if len(K) > 1000:
            assert noisy.sqrt().kind == "Product"  # by the eigenvectors of the factors
        return y @ noisy.solve(y) + noisy.logdet()

    noise = torch.tensor(0.3, dtype=torch.float64)
    found = torch.func.grad(likelihood)(noise)
    inverse = torch.linalg.inv(K.to_dense() + noise * torch.eye(len(K), dtype=torch.float64))
    torch.testing.assert_close(found, inverse.trace() - (inverse @ y).square().sum())
    reverse = noise.clone().requires_grad_()
    likelihood(reverse).backward()
    torch.testing.assert_close(reverse.grad, found)
    both = K + Diagonal(noise.expand(len(K))) + Identity(len(K), 0.2, dtype=torch.float64)
    torch.testing.assert_close(both.solve(y), (K + 0.5 * Identity(len(K), dtype=y.dtype)).solve(y))


@pytest.mark.parametrize("lengths", [[1201], [5, 1, 3, 5, 1]])
def test_functions_of_permutations_are_those_of_their_cycles(lengths):
    n = sum(lengths)
    within = torch.cat(
        [(torch.arange(L) + 1) % L + s for L, s in zip(lengths, starts(lengths), strict=True)]
    )
    names = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    P = linalg.Permutation(names[within][names.argsort()], dtype=torch.float64)
    x = randn(n)
    root = P.sqrt()
    torch.testing.assert_close(root @ (root @ x), P @ x)
    torch.testing.assert_close(P.pow(-0.5) @ (root @ x), x)
    torch.testing.assert_close(P.exp() @ x, torch.linalg.matrix_exp(P.to_dense()) @ x)
    swap = linalg.BlockDiag(P, linalg.Permutation(torch.tensor([1, 0]), dtype=torch.float64))
    with pytest.raises(ValueError, match=r"Permutation\.sqrt: an eigenvalue is negative, -1"):
        swap.sqrt()


def starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]
