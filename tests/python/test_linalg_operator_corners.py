"""Structured operators where eigenvalues coincide or vanish, columns are zero, or tensors require grad."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchium.linalg import LinearOperator

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
