"""What operators do not compute: they take no more products than their structure needs."""

from __future__ import annotations

import warnings

import pytest
import torch
from operator_cases import principal_power, randn, spd
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchium import linalg


def known_by_products(A: Tensor) -> tuple[linalg.LinearOperator, list[int]]:
    columns: list[int] = []

    def product(X: Tensor) -> Tensor:
        columns.append(X.shape[1])
        return A @ X

    return linalg.LinearOperator(len(A), product, dtype=A.dtype), columns


class Layouts(TorchDispatchMode):
    """The layouts of operands of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.layout] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen |= {x.layout for x in args if isinstance(x, Tensor)}
        return function(*args, **(kwargs or {}))


def test_integer_powers_of_small_matrices_are_products():
    A = randn(6, 6)
    operator, columns = known_by_products(A)
    torch.testing.assert_close((operator**3) @ randn(6), A @ (A @ (A @ randn(6))))
    assert columns == [1, 1, 1]
    assert linalg.Dense(A).pow(2).kind == "Power"


@pytest.mark.parametrize("kind", ["dense", "definite", "triangular", "sparse", "low rank"])
@pytest.mark.parametrize("p", [2, 3, 16, -2, -3])
def test_functions_of_integer_powers(kind, p):
    A = randn(5, 5) / 2 + 2 * torch.eye(5, dtype=torch.float64)
    d, U = A.diag(), randn(5, 2)
    operator, A = {
        "dense": lambda: (linalg.Dense(A), A),
        "definite": lambda: (linalg.Dense(spd(5)).assume("positive_definite"), spd(5)),
        "triangular": lambda: (linalg.Triangular(A), A.tril()),
        "sparse": lambda: (linalg.Sparse(A.to_sparse()), A),
        "low rank": lambda: (linalg.LowRankPlusDiagonal(d, U), torch.diag(d) + U @ U.T),
    }[kind]()
    power, expected = operator.pow(p), torch.linalg.matrix_power(A, p)

    def close(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9 * float(wanted.abs().max()))

    X = randn(2, 5, 3)
    close(power @ X, expected @ X)
    close(power.T @ X, expected.mT @ X)
    close(X.mT @ power, X.mT @ expected)
    close(power.to_dense(), expected)
    close(power.diag(), expected.diag())
    close(power.trace(), expected.trace())
    sign, logabsdet = torch.linalg.slogdet(A)
    close(torch.stack(power.slogdet()), torch.stack([sign**p, p * logabsdet]))
    close(power.inverse() @ X, torch.linalg.matrix_power(A, -p) @ X)
    close(power.pow(-2) @ X, torch.linalg.matrix_power(A, -2 * p) @ X)
    assert power.is_symmetric == operator.is_symmetric
    values, vectors = power.eigs(3)
    close((expected.to(vectors) @ vectors).abs(), (values * vectors).abs())
    if kind == "definite":
        close(power.pow(1 / p) @ X, A @ X)


def test_integer_powers_have_derivatives():
    A = (randn(4, 4) / 4 + torch.eye(4, dtype=torch.float64)).requires_grad_()
    for p in (2, -2):
        assert torch.autograd.gradcheck(lambda A, p=p: linalg.Dense(A).pow(p) @ randn(4, 2), A)
        assert torch.autograd.gradcheck(lambda A, p=p: linalg.Dense(A).pow(p).logdet(), A)


def test_powers_of_kronecker_products_are_products_of_powers():
    A = randn(3, 3)
    K = linalg.Kronecker(A, A).pow(2)
    assert K.kind == "Kronecker"
    torch.testing.assert_close(K.to_dense(), torch.kron(A @ A, A @ A))


def test_roots_of_kronecker_products_are_products_of_roots():
    """Unless angles of eigenvalues add up to more than pi."""
    c = torch.tensor(0.4 * torch.pi, dtype=torch.float64)
    A = torch.stack([torch.stack([c.cos(), -c.sin()]), torch.stack([c.sin(), c.cos()])])
    B = torch.tensor([[2.0, 1.0], [0.1, 3.0]], dtype=torch.float64)
    K = linalg.Kronecker(A, A, B)
    assert K.sqrt().kind == "Kronecker"
    for p in (0.5, -0.3):
        torch.testing.assert_close(K.pow(p).to_dense(), principal_power(K.to_dense(), p))
    K = linalg.Kronecker(A, A, A)
    assert K.sqrt().kind == "Dense"
    torch.testing.assert_close(K.sqrt().to_dense(), principal_power(K.to_dense(), 0.5))


@pytest.mark.parametrize(
    "operator",
    [
        linalg.Dense(randn(5, 5)),
        linalg.Dense(randn(2, 5, 5)),
        linalg.Triangular(randn(5, 5)),
        linalg.Diagonal(randn(5)),
        linalg.Diagonal(randn(2, 5)),
        linalg.Identity(5, 2.0, dtype=torch.float64),
    ],
    ids=lambda operator: f"{operator.kind}-{len(operator.shape)}",
)
def test_products_from_the_left_transpose_nothing(operator):
    for X in (randn(3, 5), randn(2, 3, 5), randn(1, 5)):
        found = X @ operator
        torch.testing.assert_close(found, X @ operator.to_dense())
        assert found.is_contiguous()  # the transposed of a product would not be
    torch.testing.assert_close(randn(5) @ operator, randn(5) @ operator.to_dense())


def test_dense_matrices_of_parts():
    A = randn(4, 4)
    operator, columns = known_by_products(A)
    found = linalg.BlockDiag(operator, linalg.Diagonal(randn(3))).to_dense()
    torch.testing.assert_close(found, torch.block_diag(A, torch.diag(randn(3))))
    assert columns == [4]
    T = linalg.Triangular(A)
    assert T.to_dense().data_ptr() == T.to_dense().data_ptr()  # it is stored


def test_entries_of_sparse_matrices_are_sorted_once():
    A = randn(6, 6) * (randn(6, 6) > 0)
    entries = A.to_sparse()
    indices, values = entries.indices(), entries.values() / 2
    twice = torch.sparse_coo_tensor(indices.repeat(1, 2), values.repeat(2), A.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that CSR tensors are in beta state
        operator = linalg.Sparse(twice)
    with Layouts() as layouts:
        found = operator @ randn(6, 2)
    torch.testing.assert_close(found, A @ randn(6, 2))
    torch.testing.assert_close(operator.T @ randn(6, 2), A.T @ randn(6, 2))
    torch.testing.assert_close(operator.diag(), A.diag())
    assert torch.sparse_coo not in layouts.seen


def test_sparse_matrices_keep_their_derivatives():
    A = (randn(4, 4) * (randn(4, 4) > 0)).to_sparse().requires_grad_()
    (linalg.Sparse(A) @ randn(4, 2)).sum().backward()
    assert A.grad is not None
    expected = randn(4, 2).sum(1).expand(4, 4)
    dense = A.grad.to_dense()
    mask = A.detach().to_dense() != 0
    torch.testing.assert_close(dense[mask], expected[mask])
