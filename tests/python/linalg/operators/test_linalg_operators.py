"""Every class of operators and every function of it, against the dense matrix in float64."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from operator_cases import CASES, Case, callable_operator, principal_power, randn, regular, spd
from torch import Tensor
from torchium import linalg

ERROR = 1e-11
CLASSES = {
    "identity": "Identity",
    "diagonal": "Diagonal",
    "lower": "Inverse",
    "permutation": "Permutation",
    "convolution": "Convolution",
    "product": "Product",
    "kronecker": "Kronecker",
    "kronecker_spd": "Kronecker",
    "block_diag": "BlockDiag",
    "low_rank": "LowRankPlusDiagonal",
    "low_rank_unsymmetric": "LowRankPlusDiagonal",
}


@pytest.fixture(params=CASES, ids=lambda make: make.__name__)
def case(request) -> Case:
    return request.param()


def close(found: Tensor, expected: Tensor, error: float = ERROR) -> None:
    torch.testing.assert_close(found, expected, rtol=error, atol=error, equal_nan=True)


def test_products(case):
    operator, A = case
    n = len(A)
    assert operator.shape == A.shape
    assert operator.dtype == torch.float64
    for shape in [(n,), (n, 1), (n, 4), (n, 0), (2, 3, n, 4)]:
        X = randn(*shape)
        close(operator @ X, A @ X)
        close(operator.T @ X, A.T @ X)
        close(operator.T.T @ X, A @ X)
    for shape in [(n,), (1, n), (4, n), (0, n), (2, 3, 4, n)]:
        X = randn(*shape)
        close(X @ operator, X @ A)
        close(X @ operator.T, X @ A.T)
    close(operator.to_dense(), A)
    close(operator.T.to_dense(), A.T)


def test_products_from_the_left_are_differentiable():
    A, X = regular(5).requires_grad_(), randn(3, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda A, X: X @ linalg.Dense(A), (A, X))
    batch = torch.stack([regular(5, seed) for seed in range(2)])
    close(X @ linalg.Dense(batch), X @ batch)


def test_arithmetic(case):
    operator, A = case
    other = linalg.Dense(regular(len(A), seed=9))
    B = other.to_dense()
    eye = torch.eye(len(A), dtype=torch.float64)
    for found, expected in [
        (operator @ other, A @ B),
        (other @ operator, B @ A),
        (operator + other, A + B),
        (operator - operator, 0 * A),
        (3 * operator, 3 * A),
        (operator / 2, A / 2),
        (-operator, -A),
        (operator + linalg.Identity(len(A), dtype=torch.float64), A + eye),
        (operator + linalg.Diagonal(torch.ones(len(A)).double()), A + eye),
    ]:
        close(found.to_dense(), expected)


def test_inverse(case, request):
    operator, A = case
    X = randn(len(A), 3)
    inverse = operator.inverse()
    close(operator.solve(X), torch.linalg.solve(A, X))
    close(operator.solve(X[:, 0]), torch.linalg.solve(A, X[:, 0]))
    close(inverse.to_dense(), A.inverse())
    close(inverse.T @ X, A.inverse().T @ X)
    close(inverse.inverse().to_dense(), A)
    close(inverse.logdet(), -torch.logdet(A))
    name = request.node.callspec.id
    if name in CLASSES:
        assert inverse.kind == CLASSES[name]


def test_numbers(case):
    operator, A = case
    close(operator.diag(), A.diagonal())
    close(operator.trace(), A.trace())
    sign, logabsdet = operator.slogdet()
    close(sign, torch.linalg.det(A).sign())
    close(logabsdet, torch.linalg.slogdet(A).logabsdet)
    close(operator.det(), torch.linalg.det(A))
    close(operator.logdet(), torch.logdet(A))


def test_exp_and_integer_powers(case):
    operator, A = case
    X = randn(len(A), 2)
    close(operator.exp() @ X, torch.linalg.matrix_exp(A) @ X, 1e-10)
    for p in [0, 1, 2, 3, -1, -2]:
        close((operator**p) @ X, torch.linalg.matrix_power(A, p) @ X, 1e-10)


def test_roots(case):
    operator, A = case
    if operator.kind == "Permutation":
        with pytest.raises(ValueError, match="eigenvalue is negative"):
            operator.sqrt()
        return
    root = operator.sqrt()
    close(root @ (root @ torch.eye(len(A), dtype=torch.float64)), A, 1e-10)
    for p in [0.5, -0.5, 1.5, 0.3]:
        close(operator.pow(p).to_dense(), principal_power(A, p), 1e-10)


@pytest.mark.parametrize("which", ["LM", "LR", "SR", "LI", "LA", "SA"])
def test_eigs(case, which):
    operator, A = case
    if which in (("LR", "SR", "LI") if operator.is_symmetric else ("LA", "SA")):
        with pytest.raises(ValueError, match=r"eigs: which is .*; it must be"):
            operator.eigs(2, which)
        return
    values = torch.linalg.eigvals(A)
    key = {
        "LM": values.abs(),
        "LR": values.real,
        "SR": -values.real,
        "LI": values.imag.abs(),
        "LA": values.real,
        "SA": -values.real,
    }[which]
    for k in [1, 3, None]:
        found, vectors = operator.eigs(k, which)
        count = k or len(A)
        assert vectors.shape == (len(A), count)
        assert found.is_complex() != operator.is_symmetric
        mine = {"LM": found.abs(), "LI": found.imag.abs() if found.is_complex() else found}.get(
            which, found.real if which[0] == "L" else -found.real
        )
        close(mine, key.sort(descending=True).values[:count].to(mine), 1e-9)
        residual = A.to(vectors) @ vectors - vectors * found
        assert residual.norm() <= 1e-10 * A.norm()
        close(vectors.norm(dim=0), torch.ones(count, dtype=torch.float64))
    assert torch.linalg.matrix_rank(vectors) == len(A)


@pytest.mark.parametrize("property", ["symmetric", "positive_definite"])
def test_symmetric_operators_know_it(property):
    A = spd(6)
    operator = linalg.LinearOperator(6, lambda X: A @ X, dtype=torch.float64)
    assert not operator.is_symmetric
    declared = operator.assume(property)
    for made in [declared, declared.T, declared.inverse(), declared.exp(), declared**2]:
        assert made.is_symmetric
    assert (declared + declared).is_symmetric
    assert linalg.Kronecker(declared, declared).is_symmetric
    assert not linalg.Kronecker(declared, operator).is_symmetric
    close(declared.inverse().to_dense(), A.inverse())
    close(declared.sqrt().to_dense(), principal_power(A, 0.5))


def test_symmetric_convolutions_have_real_eigenvectors():
    kernel = torch.tensor([2.0, -0.5, 0, 0, 0, -0.5], dtype=torch.float64)
    operator = linalg.Convolution(kernel).assume("positive_definite")
    values, vectors = operator.eigs()
    assert not vectors.is_complex()
    close(vectors.T @ vectors, torch.eye(6, dtype=torch.float64))
    close(operator.to_dense() @ vectors, vectors * values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_stay(dtype):
    error = 100 * torch.finfo(dtype).eps
    A, B = spd(3).to(dtype), spd(4, seed=1).to(dtype)
    operator = linalg.Kronecker(A, B)
    X = randn(12, 2).to(dtype)
    for found, expected in [
        (operator @ X, torch.kron(A, B).double() @ X.double()),
        (operator.solve(X), torch.linalg.solve(torch.kron(A, B).double(), X.double())),
        (operator.logdet(), torch.logdet(torch.kron(A, B).double())),
        (operator.diag(), torch.kron(A, B).diagonal().double()),
        (operator.eigs(2)[0].real, torch.linalg.eigvals(torch.kron(A, B).double()).real.sort().values[-2:].flip(0)),
    ]:  # fmt: skip
        assert found.dtype == dtype
        close(found.double(), expected, error)


def test_order_one():
    one = torch.full((1, 1), 4.0, dtype=torch.float64)
    for operator in [
        linalg.Dense(one),
        linalg.Diagonal(one[0]),
        linalg.Triangular(one),
        linalg.Convolution(one[0]),
        linalg.Sparse(one.to_sparse()),
        linalg.Kronecker(one / 2, 2 * torch.ones_like(one)),
        linalg.BlockDiag(one),
        linalg.LowRankPlusDiagonal(one[0] - 1, torch.ones_like(one)),
        linalg.Product(one),
        linalg.Sum(one),
        linalg.LinearOperator(1, lambda X: 4 * X, dtype=torch.float64),
    ]:
        for found, expected in [
            (operator.inverse().to_dense(), 0.25),
            (operator.sqrt().to_dense(), 2.0),
            (operator.exp().to_dense(), math.exp(4)),
            (operator.trace(), 4.0),
            (operator.det(), 4.0),
            (operator.eigs()[0].real, 4.0),
        ]:
            assert abs(found.item() - expected) <= 1e-13 * expected, operator


BATCHED = {
    "Dense": lambda A: linalg.Dense(A),
    "positive definite": lambda A: linalg.Dense(A @ A.mT).assume("positive_definite"),
    "Diagonal": lambda A: linalg.Diagonal(A.diagonal(dim1=-2, dim2=-1)),
    "Triangular": lambda A: linalg.Triangular(A),
    "Convolution": lambda A: linalg.Convolution(A[..., 0], [4]),
    "LowRankPlusDiagonal": lambda A: linalg.LowRankPlusDiagonal(
        torch.ones(4).double(), A[..., :2], A[..., :2] / 2
    ),
    "Kronecker": lambda A: linalg.Kronecker(A, regular(2)),
    "BlockDiag": lambda A: linalg.BlockDiag(A, regular(3)),
    "Sum": lambda A: linalg.Sum(A, regular(4)),
    "Product": lambda A: linalg.Product(regular(4), linalg.Dense(A)),
    "Scaled": lambda A: 2 * linalg.Dense(A),
}


@pytest.mark.parametrize("kind", BATCHED)
def test_batches_are_the_matrices_one_by_one(kind):
    A = torch.stack([torch.stack([regular(4, seed=3 * i + j) for j in range(3)]) for i in range(2)])
    batch = BATCHED[kind](A)
    assert batch.shape[:2] == (2, 3)
    X = randn(2, 3, len(batch), 2)
    functions = {
        "matmul": lambda B, X: B @ X,
        "transposed": lambda B, X: B.T @ X,
        "solve": lambda B, X: B.solve(X),
        "exp": lambda B, X: B.exp() @ X,
        "sqrt": lambda B, X: B.sqrt() @ X,
        "square": lambda B, X: (B**2) @ X,
        "diag": lambda B, X: B.diag(),
        "trace": lambda B, X: B.trace(),
        "logdet": lambda B, X: B.logdet(),
        "det": lambda B, X: B.det(),
        "dense": lambda B, X: B.to_dense(),
    }
    for name, function in functions.items():
        if kind == "Convolution" and name == "sqrt":
            continue  # eigenvalues may be negative
        if kind == "Triangular" and name == "sqrt":
            continue
        found = function(batch, X)
        for i in range(2):
            for j in range(3):
                close(found[i, j], function(BATCHED[kind](A[i, j]), X[i, j]))
    with pytest.raises(ValueError, match="eigs: the operator is a batch of matrices"):
        batch.eigs(1)


def test_gradients_reach_what_operators_are_made_of():
    A, B = regular(2).requires_grad_(), spd(3).requires_grad_()
    d = torch.linspace(1, 2, 6, dtype=torch.float64).requires_grad_()
    X = randn(6, 2).requires_grad_()

    def kronecker(A, B, X):
        return linalg.Kronecker(A, B) @ X

    def solutions(A, B, d, X):
        K = linalg.Kronecker(A, linalg.Dense(B @ B.T).assume("positive_definite"))
        low_rank = linalg.LowRankPlusDiagonal(d, X)
        return K.solve(X) + low_rank.solve(X), low_rank.logdet() + K.logdet() + K.trace()

    def others(A, d, X):
        C = linalg.Convolution(d)
        T = linalg.Triangular(A)
        return (
            C @ X,
            C.solve(X),
            linalg.BlockDiag(T, linalg.Diagonal(d)).solve(torch.cat([X[:2], X])),
            (linalg.Diagonal(d).sqrt() + linalg.Diagonal(d)) @ X,
            linalg.Dense(A).exp().to_dense(),
        )

    assert torch.autograd.gradcheck(kronecker, (A, B, X))
    assert torch.autograd.gradcheck(solutions, (A, B, d, X))
    assert torch.autograd.gradcheck(others, (A, d, X))


def test_functions_of_symmetric_matrices_have_tangents_too():
    B = regular(3).requires_grad_()
    X = randn(6, 2).requires_grad_()

    def functions(B, X):
        A = linalg.Dense(B @ B.T).assume("positive_definite")
        noisy = linalg.Kronecker(A, linalg.Diagonal(B[0, :2].square() + 1)) + linalg.Identity(
            6, 0.1, dtype=torch.float64
        )
        return (
            A.exp().to_dense(),
            A.sqrt().to_dense(),
            A.pow(-0.3).to_dense(),
            A.eigs()[0],
            noisy.solve(X),
            noisy.logdet(),
            noisy.sqrt() @ X,
        )

    assert torch.autograd.gradcheck(functions, (B, X), check_forward_ad=True)


def test_gradients_pass_through_python_functions():
    A = regular(4).requires_grad_()
    X = randn(4, 2).requires_grad_()

    def function(A, X):
        operator = linalg.LinearOperator(4, lambda X: A @ X, dtype=torch.float64)
        return linalg.Kronecker(linalg.Identity(1, dtype=torch.float64), operator) @ X

    assert torch.autograd.gradcheck(function, (A, X))


def test_a_transposed_product_may_be_given_or_derived():
    A = regular(5)
    X = randn(5, 2)
    given = linalg.LinearOperator(
        5, lambda X: (A @ X).detach(), dtype=torch.float64, transpose_product=lambda X: A.T @ X
    )
    close(given.T @ X, A.T @ X)
    derived, _ = callable_operator()
    with torch.no_grad():
        close(derived.T @ randn(6), regular(6).T @ randn(6))
    cut = linalg.LinearOperator(5, lambda X: (A @ X).detach(), dtype=torch.float64)
    with pytest.raises(ValueError, match="needs transpose_product"):
        _ = cut.T @ X


def test_python_functions_live_as_long_as_operators_made_of_them():
    def make() -> linalg.LinearOperator:
        A = regular(3)
        leaf = linalg.LinearOperator(3, lambda X: A @ X, dtype=torch.float64)
        return (2 * linalg.Kronecker(leaf, leaf).T).inverse().T

    operator = make()
    gc.collect()
    expected = torch.linalg.inv(2 * torch.kron(regular(3), regular(3)))
    close(operator.to_dense(), expected)


def test_errors_of_python_functions_pass_through():
    class Broken(Exception):
        pass

    def product(X):
        raise Broken("in the product")

    operator = linalg.Kronecker(linalg.LinearOperator(3, product), torch.eye(2))
    with pytest.raises(Broken, match="in the product"):
        _ = operator @ torch.ones(6)


def test_results_are_of_the_classes_of_their_structure():
    K = linalg.Kronecker(regular(2), regular(3))
    assert type(K.inverse()) is linalg.Kronecker
    assert type(K.T) is linalg.Kronecker
    assert type(K + K) is linalg.Sum
    assert type(K @ K) is linalg.Product
    assert type(linalg.Diagonal(torch.ones(2)) + linalg.Identity(2)) is linalg.Diagonal
    low_rank = linalg.LowRankPlusDiagonal(torch.ones(3), torch.ones(3, 1))
    assert type(low_rank + linalg.Identity(3)) is linalg.LowRankPlusDiagonal
    assert repr(K) == "Kronecker(n=6, dtype=torch.float64, device='cpu')"
    assert "batch=[2], n=3" in repr(linalg.Dense(torch.ones(2, 3, 3)))


@pytest.mark.cuda
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_cuda_agrees_with_the_cpu(make):
    _, A = make()
    K = linalg.Kronecker(A.cuda(), linalg.Diagonal(torch.tensor([1.0, 2.0]).double().cuda()))
    expected = linalg.Kronecker(A, linalg.Diagonal(torch.tensor([1.0, 2.0]).double()))
    X = randn(2 * len(A), 3)
    close((K @ X.cuda()).cpu(), expected @ X)
    close(K.solve(X.cuda()).cpu(), expected.solve(X))
    close(K.logdet().cpu(), expected.logdet())
    close(K.diag().cpu(), expected.diag())
    close(K.exp().to_dense().cpu(), expected.exp().to_dense(), 1e-9)
    assert torch.allclose(K.eigs(1)[0].abs().cpu(), expected.eigs(1)[0].abs())


@pytest.mark.cuda
def test_cuda_structures():
    d = torch.linspace(1, 2, 6).double().cuda()
    perm = torch.tensor([2, 0, 1, 3, 5, 4]).cuda()
    kernel = torch.tensor([2.0, 0.3, -0.2]).double().cuda()
    A = regular(6)
    n = 2000
    laplacian = torch.sparse.spdiags(
        torch.stack([-torch.ones(n), 3 * torch.ones(n), -torch.ones(n)]).double(),
        torch.tensor([-1, 0, 1]),
        (n, n),
    ).cuda()
    for operator in [
        linalg.Permutation(perm, dtype=torch.float64),
        linalg.Convolution(kernel, [7]),
        linalg.LowRankPlusDiagonal(d, randn(6, 2).cuda()),
        linalg.Triangular((A + 3 * torch.eye(6)).cuda()),
        linalg.Sparse(laplacian),
        linalg.Sparse(laplacian).assume("positive_definite"),
        linalg.BlockDiag(A.cuda(), linalg.Diagonal(d)),
    ]:
        X = randn(len(operator), 2).cuda()
        close(operator @ operator.solve(X, tol=1e-12), X, 1e-9)
        values, vectors = operator.eigs(2)
        applied = torch.complex(operator @ vectors.real, operator @ vectors.imag) if (
            vectors.is_complex()
        ) else operator @ vectors  # fmt: skip
        close(applied, vectors * values, 1e-4)  # the tolerance of eigs
