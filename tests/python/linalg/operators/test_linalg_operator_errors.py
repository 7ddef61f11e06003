"""Operators refuse singular matrices and wrong arguments with name, value and remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchium import linalg

I2 = torch.eye(2)
I3 = torch.eye(3)
ONES = torch.ones(3)


def singular_operators() -> dict[str, linalg.LinearOperator]:
    zero = torch.tensor([1.0, 0, 2])
    rank_one = torch.ones(3, 3)
    product = linalg.LinearOperator(3, lambda X: rank_one @ X)
    return {
        "Dense": linalg.Dense(rank_one),
        "Diagonal": linalg.Diagonal(zero),
        "Triangular": linalg.Triangular(torch.diag(zero)),
        "Identity": linalg.Identity(3, 0.0),
        "Convolution": linalg.Convolution(torch.tensor([1.0, -1, 0])),
        "Sparse": linalg.Sparse(rank_one.to_sparse()),
        "LinearOperator": product,
        "LowRankPlusDiagonal": linalg.LowRankPlusDiagonal(
            torch.ones(3), torch.tensor([[1.0], [0], [0]]), torch.tensor([[-1.0], [0], [0]])
        ),
        "LowRankPlusDiagonal without a diagonal": linalg.LowRankPlusDiagonal(
            torch.zeros(3), torch.ones(3, 1)
        ),
    }


@pytest.mark.parametrize("kind", singular_operators())
def test_singular_operators(kind):
    A = singular_operators()[kind]
    name = kind.split()[0]
    for B, expected in [
        (A, name),
        (linalg.Kronecker(A, I2), name),
        (linalg.BlockDiag(I2, A), name),
    ]:
        with pytest.raises(
            ValueError, match=rf"{expected}\.\w+: the operator is singular: .*identity"
        ):
            B.inverse()
        assert abs(B.det().item()) <= 1e-6
    with pytest.raises(ValueError, match=r"\.solve: the operator is singular"):
        A.solve(ONES)


def test_what_is_not_positive():
    A = torch.diag(torch.tensor([1.0, -1, 2]))
    with pytest.raises(ValueError, match="assumed to be positive definite, but it is not"):
        linalg.Dense(A).assume("positive_definite").inverse()
    symmetric = linalg.Dense(A).assume("symmetric")
    with pytest.raises(ValueError, match=r"sqrt: an eigenvalue is negative, -1; the power 0\.5"):
        symmetric.sqrt()
    with pytest.raises(ValueError, match="pow: an eigenvalue is negative"):
        linalg.Diagonal(A.diagonal()).pow(0.3)
    assert torch.equal((symmetric**2).to_dense(), A @ A)
    assert symmetric.logdet().isnan()
    assert symmetric.det() == -2
    nilpotent = linalg.Dense(torch.tensor([[0.0, 1], [0, 0]]))
    with pytest.raises(ValueError, match="no well-conditioned basis of eigenvectors"):
        nilpotent.sqrt()
    with pytest.raises(ValueError, match="they are linearly dependent up to rounding"):
        linalg.Dense(torch.eye(200) + torch.ones(200, 200).tril(-1)).sqrt()


def test_rounding_errors_of_zeros_are_no_negative_eigenvalues():
    u = torch.linspace(0.1, 1, 20)
    A = linalg.Dense(torch.outer(u, u)).assume("symmetric")
    root = A.sqrt().to_dense()
    torch.testing.assert_close(root @ root, torch.outer(u, u), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linalg.Dense(np.eye(3)), r"Dense: A is array.*ndarray.*torch\.as_tensor converts"),
        (lambda: linalg.Dense(torch.ones(2, 3)), r"Dense: A is \[2, 3\]; it must be a square"),
        (lambda: linalg.Dense(torch.ones(0, 0)), r"Dense: A is \[0, 0\].*must not be empty"),
        (lambda: linalg.Dense(I3.half()), "Dense: A is float16; it must be float32 or float64"),
        (lambda: linalg.Dense(I3.to_sparse()), "Dense: A is a tensor of layout Sparse.*Sparse takes"),
        (lambda: linalg.Diagonal(torch.ones(())), r"Diagonal: d is \[\]; it must have at least 1"),
        (lambda: linalg.Diagonal(torch.arange(3)), "Diagonal: d is int64; it must be float32"),
        (lambda: linalg.Identity(0), "Identity: n is 0; it must be positive"),
        (lambda: linalg.Identity(2.5), r"Identity: n is 2\.5 \(float\); it must be a positive"),
        (lambda: linalg.Identity(2, float("nan")), "Identity: scale is nan; it must be finite"),
        (lambda: linalg.Identity(2, dtype=torch.half), "Identity: dtype is float16; it must be"),
        (lambda: linalg.Triangular(ONES), r"Triangular: A is \[3\]; it must be a square matrix"),
        (lambda: linalg.Permutation(torch.tensor([0, 2])), "every index from 0 to 1 once"),
        (lambda: linalg.Permutation(ONES), r"Permutation: perm is \[3\] of Float; .*int64"),
        (lambda: linalg.Convolution(ONES, [2]), r"kernel is \[3\]; .* as many entries as shape, \[2\]"),
        (lambda: linalg.Convolution(ONES, [2, 2]), r"shape is \[2, 2\]; it must have from 1 to 1"),
        (lambda: linalg.Sparse(I3), r"Sparse: A is a dense tensor; pass A\.to_sparse\(\)"),
        (lambda: linalg.Sparse(torch.ones(2, 3).to_sparse()), r"Sparse: A is \[2, 3\]; .*square"),
        (lambda: linalg.Sparse(I3.to_sparse_csc()), "Sparse: A is of layout SparseCsc; .*COO or CSR"),
        (lambda: linalg.Product(), "Product: factors is empty; pass at least one operator"),
        (lambda: linalg.Sum(I2, I3), r"Sum: terms\[1\] is of order 3, terms\[0\] of order 2"),
        (lambda: linalg.Dense(I2) @ linalg.Dense(I3), r"Product: factors\[1\] is of order 3"),
        (lambda: linalg.Kronecker(I2, I3.double()), r"Kronecker: factors\[1\] is Double on cpu"),
        (lambda: linalg.BlockDiag(I2, 3), r"BlockDiag: blocks\[1\] is 3 \(int\); it must be a tensor"),
        (lambda: linalg.LowRankPlusDiagonal(ONES, I2), r"U is \[2, 2\]; it must have 3 rows"),
        (lambda: linalg.LowRankPlusDiagonal(ONES, I3, I3[:, :1]), r"V is \[3, 1\]; .*\[3, 3\]"),
        (lambda: linalg.LowRankPlusDiagonal(ONES, I3.double()), "they must be of one dtype"),
        (lambda: linalg.LinearOperator(3, 4), "product is 4; it must be a function of X"),
        (lambda: linalg.LinearOperator(3, abs, transpose_product=4), "transpose_product is 4"),
        (lambda: linalg.LinearOperator(3, lambda X: None) @ ONES, "product returns NoneType"),
        (lambda: linalg.LinearOperator(3, lambda X: X.mT) @ ONES, "must be of the same shape"),
        (lambda: linalg.Dense(I3) @ torch.ones(4), r"Dense: X is \[4\]; it must have 3 rows"),
        (lambda: linalg.Dense(I3) @ ONES.double(), "Dense: X is Double on cpu, the operator Float"),
        (lambda: linalg.Dense(I3) @ 3, r"Dense: X is 3 \(int\); it must be a tensor"),
        (lambda: torch.ones(4) @ linalg.Dense(I3), r"Dense: X is \[4\]; it must have 3 columns"),
        (lambda: torch.ones(3, 4) @ linalg.Dense(I3), r"X is \[3, 4\]; it must have 3 columns"),
        (lambda: ONES.double() @ linalg.Dense(I3), "Dense: X is Double on cpu, the operator Float"),
        (lambda: [1.0, 2.0, 3.0] @ linalg.Dense(I3), r"Dense: X is .*list\); it must be a tensor"),
        (lambda: linalg.Dense(I3) * float("inf"), "Scaled: c is inf; it must be finite"),
        (lambda: linalg.Dense(I3) / 0, "Dense: c is 0"),
        (lambda: linalg.Dense(I3) * linalg.Dense(I3), "products of operators are written A @ B"),
        (lambda: linalg.Dense(I3).assume("psd"), 'assume: property is "psd"; it must be "symmetric"'),
        (lambda: linalg.Dense(I3).assume(3), r"assume: property is 3 \(int\); it must be"),
        (lambda: linalg.Dense(I3).eigs(4), "eigs: k is 4; it must be from 1 to n = 3"),
        (lambda: linalg.Dense(I3).eigs(0), "eigs: k is 0; it must be from 1 to n = 3"),
        (lambda: linalg.Dense(I3).eigs(1, "XX"), 'eigs: which is "XX"; it must be "LM"'),
        (lambda: linalg.Dense(I3).pow(float("nan")), "pow: exponent is nan; it must be finite"),
        (lambda: linalg.Dense(I3).pow("2"), r"pow: exponent is '2' \(str\); it must be a number"),
        (lambda: linalg.Dense(I3).solve(ONES, tol=-1.0), "solve: tol is -1; it must be finite"),
        (lambda: linalg.Dense(I3).inverse(max_iterations=0), "inverse: max_iterations is 0"),
        (lambda: linalg.Dense(I3).trace(num_samples=0), "trace: num_samples is 0; it must be positive"),
        (lambda: linalg.Dense(I3).diag(seed="a"), r"diag: seed is 'a' \(str\); it must be an integer"),
        (lambda: linalg.cg(3, ONES), "cg: A is of type int"),
        (lambda: linalg.cg(I3, torch.ones(4)), r"cg: B is \[4\]; .*3 rows"),
        (lambda: linalg.cg(I3, ONES.double()), "cg: B is Double on cpu, A is Float on cpu"),
        (lambda: linalg.gmres(I3, ONES, restart=0), "gmres: restart is 0; it must be positive"),
        (lambda: linalg.gmres(I3, ONES, preconditioner=I2), r"preconditioner is \[2, 2\]; .*\[3, 3\]"),
        (lambda: linalg.lanczos(linalg.Dense(torch.ones(2, 3, 3)), 1), r"lanczos: A is \[2, 3, 3\], a batch"),
    ],
)  # fmt: skip
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
