"""Copies and pickles of structured operators."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from operator_cases import randn, regular, spd
from torch import Tensor, nn
from torchium import linalg
from torchium.linalg import LinearOperator


def double(X: Tensor) -> Tensor:
    return 2 * X


def pickled(A):
    return pickle.loads(pickle.dumps(A))


def saved(A):
    file = io.BytesIO()
    torch.save(A, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


d = torch.linspace(0.5, 2, 6, dtype=torch.float64)
OPERATORS = {
    "Dense": lambda: linalg.Dense(regular(6)),
    "batch": lambda: linalg.Dense(torch.stack([regular(6), spd(6)])),
    "assumed": lambda: linalg.Dense(spd(6)).assume("positive_definite"),
    "transposed": lambda: linalg.Dense(regular(6)).T,
    "Diagonal": lambda: linalg.Diagonal(d),
    "uniform": lambda: linalg.Diagonal(d[0].expand(6)),
    "Identity": lambda: linalg.Identity(6, 1.5, dtype=torch.float64),
    "Triangular": lambda: linalg.Triangular(regular(6), lower=False),
    "Permutation": lambda: linalg.Permutation(torch.arange(6).roll(1), dtype=torch.float64),
    "Convolution": lambda: linalg.Convolution(d[:2].reshape(1, 2), (2, 3)),
    "circulant": lambda: linalg.Convolution(d),
    "Sparse": lambda: linalg.Sparse(regular(6).to_sparse_csr()),
    "COO": lambda: linalg.Sparse(regular(6).to_sparse()),
    "LowRankPlusDiagonal": lambda: linalg.LowRankPlusDiagonal(d, randn(6, 2)),
    "Product": lambda: linalg.Product(regular(6), linalg.Diagonal(d)),
    "Sum": lambda: linalg.Sum(linalg.Kronecker(spd(2), spd(3)), linalg.Diagonal(d)),
    "Kronecker": lambda: linalg.Kronecker(spd(2), linalg.Triangular(regular(3)).T),
    "BlockDiag": lambda: linalg.BlockDiag(spd(2), linalg.Identity(4, dtype=torch.float64)),
    "function": lambda: LinearOperator(6, double, dtype=torch.float64, transpose_product=double),
}


@pytest.mark.parametrize("through", [pickled, copy.deepcopy, saved])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_copy_is_the_same_matrix_with_its_structure(name, through):
    A = OPERATORS[name]()
    again = through(A)
    assert type(again) is type(A)
    assert repr(again) == repr(A)
    assert again.is_symmetric == A.is_symmetric
    assert again.inverse().kind == A.inverse().kind
    assert torch.equal(again.to_dense(), A.to_dense())
    assert torch.equal(through(again).to_dense(), A.to_dense())


def test_a_deep_copy_has_its_own_tensors_and_shares_those_that_are_copied_with_it():
    model = nn.Module()
    model.d = nn.Parameter(torch.ones(3))
    model.A = linalg.Kronecker(linalg.Diagonal(model.d), linalg.Identity(2))
    other = copy.deepcopy(model)
    other.A.trace().backward()
    assert model.d.grad is None
    assert torch.equal(other.d.grad, torch.full((3,), 2.0))
    assert copy.copy(model.A) is model.A


def test_copies_of_functions_survive_their_originals():
    A = OPERATORS["function"]()
    products = weakref.ref(next(iter(A._products)))
    again = copy.deepcopy(linalg.Sum(A, A))
    del A
    gc.collect()
    assert products() is None
    assert torch.equal(again @ d, 4 * d)


class Doubling(LinearOperator):
    def __init__(self, n: int) -> None:
        self.factor = 2
        super().__init__(n, self.double)

    def double(self, X: Tensor) -> Tensor:
        return self.factor * X


@pytest.mark.parametrize("through", [pickled, copy.deepcopy])
def test_copies_of_derived_classes_keep_their_attributes(through):
    again = through(Doubling(3))
    assert type(again) is Doubling
    assert again.factor == 2
    assert torch.equal(again @ torch.ones(3), torch.full((3,), 2.0))


@pytest.mark.parametrize("through", [pickled, copy.deepcopy])
@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (lambda A: A + A, "Sum"),
        (lambda A: 2 * A, "Scaled"),
        (lambda A: A.inverse(), "Inverse"),
        (lambda A: linalg.Kronecker(A, 2 * A), "Scaled"),
    ],
)
def test_results_of_operations_are_refused_by_name(result, kind, through):
    A = result(linalg.Dense(spd(3)))
    with pytest.raises(TypeError, match=rf"^{kind}: only operators .* Sum\(A, B\) for A \+ B"):
        through(A)
    assert copy.copy(A) is A


def test_results_of_operations_do_not_keep_their_operands():
    g = torch.ones(3)
    A = linalg.Diagonal(g)
    operand = weakref.ref(A)
    A = A + A
    gc.collect()
    assert operand() is None
