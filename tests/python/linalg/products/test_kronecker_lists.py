"""kron_matmul and kron_solve: lists of pairs, and solutions without damping."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cuda_launches import launches_of
from matrix_cases import ALL_FLOATS, FLOATS, eps, floor, norm, randn, rounding, symmetric
from reference import products as reference
from torch import Tensor
from torchium import linalg

Lists = tuple[list[Tensor], list[Tensor], list[Tensor]]


def pairs(dtype: torch.dtype, device: torch.device) -> Lists:
    """Two shapes, one of them twice, and a batch."""
    shapes = [((), 3, 5), ((), 4, 2), ((), 3, 5), ((2,), 3, 5)]
    A = [symmetric("spread", n, seed=i, batch=b) for i, (b, n, _) in enumerate(shapes)]
    B = [symmetric("clustered", n, seed=i + 9, batch=b) for i, (b, _, n) in enumerate(shapes)]
    X = [randn(*b, m * n, 2, seed=i) for i, (b, m, n) in enumerate(shapes)]
    on_device = lambda list_: [x.to(device, dtype) for x in list_]  # noqa: E731
    return on_device(A), on_device(B), on_device(X)


@pytest.mark.parametrize("dtype", ALL_FLOATS)
def test_products_of_lists(dtype, device):
    A, B, X = pairs(dtype, device)
    found = linalg.kron_matmul(A, B, X)
    assert isinstance(found, list)
    for a, b, x, y in zip(A, B, X, found, strict=True):
        exact = reference.kron(a, b) @ x.double()
        assert y.shape == x.shape
        assert y.dtype == dtype
        bound = (100 * eps(dtype) + 2 * rounding(dtype)) * norm(reference.kron(a, b)) * norm(x)
        assert (norm(y - exact) <= bound).all()
    assert linalg.kron_matmul([], [], []) == []


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ALL_FLOATS)
def test_solutions_of_lists(dtype, damping, device):
    A, B, X = pairs(dtype, device)
    found = linalg.kron_solve(tuple(A), tuple(B), tuple(X), damping)
    for a, b, x, y in zip(A, B, X, found, strict=True):
        exact = reference.kron_solve(a, b, x, damping)
        K = reference.damped(
            reference.kron(reference.damped(a, 0), reference.damped(b, 0)), damping
        )
        relative = 20 * floor(5, dtype) * torch.linalg.cond(K) + 4 * rounding(dtype)
        assert y.dtype == dtype
        assert (norm(y - exact) <= relative * norm(exact)).all()


@pytest.mark.parametrize("scales", [(1e-30, 1e30), (1e30, 1e-30), (1e-30, 1e-3), (1e20, 1e15)])
def test_solutions_without_damping_at_any_scale(scales, device):
    A = (scales[0] * symmetric("spread", 4)).float().to(device)
    B = (scales[1] * symmetric("spread", 5, seed=1)).float().to(device)
    for unit in (1e-35, 1.0, 1e35):
        X = (unit * randn(20, 3)).float().to(device)
        exact = reference.kron_solve(A, B, X, 0.0)
        if not 1e-30 < exact.abs().max() < 1e35:
            continue
        condition = torch.linalg.cond(A.double()) * torch.linalg.cond(B.double())
        error = norm(linalg.kron_solve(A, B, X, 0.0) - exact)
        assert (error <= 20 * floor(5, torch.float32) * condition * norm(exact)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zero", ["A", "B"])
def test_a_zero_factor_counts_as_its_floor(dtype, zero, device):
    A, B = symmetric("clustered", 3), symmetric("rank_deficient", 4, seed=1)
    if zero == "A":
        A = torch.zeros_like(A)
    else:
        A, B = B, torch.zeros_like(A)
    X = randn(12, 2)
    found = linalg.kron_solve(*(x.to(device, dtype) for x in (A, B, X)), 0.0)
    assert found.isfinite().all()
    tiny = torch.finfo(dtype).tiny
    least = X * tiny  # the solution with 1 / tiny for the factor that is zero, and 1 for the other
    scaled = linalg.kron_solve(*(x.to(device, dtype) for x in (A, B, least)), 0.0).double().cpu()
    inverse = [
        torch.eye(len(M), dtype=torch.float64)
        if not M.any()
        else linalg.spd_inverse(M.to(device, dtype)).double().cpu()
        for M in (A, B)
    ]
    exact = reference.kron(*inverse) @ X
    # On a GPU rounding moves the least eigenvalue of the other factor by a part of its floor.
    assert norm(scaled - exact) <= (1e-2 if device.type == "cpu" else 0.1) * norm(exact)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-40), (torch.float64, 1e-310)])
def test_denormal_factors_have_solutions(dtype, scale, device):
    A, B, X = symmetric("clustered", 3), symmetric("clustered", 2, seed=1), randn(6, 2)
    arguments = ((scale * A).to(device, dtype), B.to(device, dtype), (scale * X).to(device, dtype))
    exact = reference.kron_solve(A, B, X, 0.0)
    assert norm(linalg.kron_solve(*arguments, 0.0).double().cpu() - exact) <= 1e-2 * norm(exact)


@pytest.mark.parametrize("batches", [((2,), (), ()), ((), (3, 1), (2,)), ((), (), (2,))])
def test_pairs_broadcast_within_lists(batches, device):
    a, b, x = batches
    A = [symmetric("spread", 3, seed=i, batch=a).to(device) for i in range(3)]
    B = [symmetric("spread", 2, seed=i, batch=b).to(device) for i in range(3)]
    X = [randn(*x, 6, 2, seed=i).to(device) for i in range(3)]
    for function in (linalg.kron_matmul, lambda *x: linalg.kron_solve(*x, 0.1)):
        for y, *pair in zip(function(A, B, X), A, B, X, strict=True):
            torch.testing.assert_close(y, function(*pair))


def test_non_finite_columns_and_factors_stay_alone(device):
    A = symmetric("spread", 3, batch=(2,)).to(device)
    B, X = symmetric("spread", 2, seed=1).to(device), randn(2, 6, 3).to(device)
    expected = linalg.kron_solve(A, B, X)
    X[1, 2, 1] = torch.nan
    A[0, 0, 0] = torch.nan
    found = linalg.kron_solve(A, B, X, 0.0)
    assert found[0].isnan().all()
    assert found[1, :, 1].isnan().all()
    torch.testing.assert_close(found[1, :, [0, 2]], expected[1, :, [0, 2]])


def test_products_of_lists_are_differentiable():
    A, B, X = pairs(torch.float64, torch.device("cpu"))
    for x in (*A, *B, *X):
        x.requires_grad_()
    sum(y.sin().sum() for y in linalg.kron_matmul(A, B, X)).backward()
    for a, b, x in zip(A, B, X, strict=True):
        found = [a.grad, b.grad, x.grad]
        expected = torch.autograd.grad((linalg.kron(a, b) @ x).sin().sum(), [a, b, x])
        torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="kron_solve has no derivative, but A requires grad"):
        linalg.kron_solve(A, B, X, 0.1)


@pytest.mark.parametrize("name", ["kron_matmul", "kron_solve"])
def test_lists_that_do_not_fit(name):
    A, B, X = pairs(torch.float32, torch.device("cpu"))
    damping = [0.1] if name == "kron_solve" else []

    def refuses(message: str, *lists) -> None:
        with pytest.raises(ValueError, match=rf"{name}: {message}"):
            getattr(linalg, name)(*lists, *damping)

    refuses("A, B and X have 4, 3 and 4 entries; they must be lists of one length", A, B[:3], X)
    refuses(r"A is \[.*; it must be a tensor", A, B[0], X)
    refuses(r"X\[2\] is 3 .*; it must be a tensor", A, B, [*X[:2], 3, X[3]])
    refuses(r"B\[1\] has dtype Double", A, [B[0], B[1].double(), *B[2:]], X)
    batch = [torch.ones(5, 3, 3), *A[1:]], [torch.ones(4, 5, 5), *B[1:]]
    refuses(r"the leading dimensions of A\[0\] .* and B\[0\] .* do not broadcast", *batch, X)
    refuses(r"X\[0\] has shape \[8, 2\].* it must be \[..., 15, ", A, B, [X[1], *X[1:]])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ALL_FLOATS)
def test_one_kernel_multiplies_by_pairs_of_all_shapes(dtype):
    shapes = [(1, 1, 1, 1, 1), (64, 64, 64, 64, 1), (65, 17, 3, 130, 2), (5, 200, 100, 7, 9)]
    A = [randn(m, n, dtype=dtype, seed=i).cuda() for i, (m, n, *_) in enumerate(shapes)]
    B = [randn(q, p, dtype=dtype, seed=i).cuda().mT for i, (*_, p, q, _) in enumerate(shapes)]
    X = [randn(s[1] * s[3], s[4], dtype=dtype, seed=i).cuda() for i, s in enumerate(shapes)]
    found = linalg.kron_matmul(A, B, X)
    assert launches_of(lambda: linalg.kron_matmul(A, B, X)) == 2
    for a, b, x, y in zip(A, B, X, found, strict=True):
        exact = linalg.kron_matmul(a.double(), b.double(), x.double())
        scale = linalg.kron_matmul(a.double().abs(), b.double().abs(), x.double().abs())
        assert y.dtype == dtype
        unit = a.shape[1] * b.shape[1] * eps(dtype) + rounding(dtype)
        assert ((y.double() - exact).abs() <= 2 * unit * scale).all()


@pytest.mark.cuda
@pytest.mark.parametrize("solve", [False, True])
def test_the_number_of_launches_is_that_of_a_pair(solve):
    def lists(count: int) -> Lists:
        make = lambda n, k: [symmetric("spread", n).float().cuda() for _ in range(k)]  # noqa: E731
        X = [randn(20 * 30, 1, dtype=torch.float32).cuda() for _ in range(count)]
        return make(20, count), make(30, count), X

    function = (lambda *x: linalg.kron_solve(*x, 0.0)) if solve else linalg.kron_matmul
    few, many = (launches_of(partial(function, *lists(n))) for n in (8, 64))
    assert many <= 1.5 * few  # torch.cat may take a launch more


def test_a_sum_of_kronecker_products_is_solved_by_conjugate_gradients(device):
    def positive(n: int, seed: int) -> linalg.LinearOperator:
        A = symmetric("spread", n, seed=seed).to(device)
        return linalg.Dense(A / torch.linalg.matrix_norm(A, 2)).assume("positive_definite")

    factors = [(positive(40, 0), positive(30, 1)), (positive(40, 2), positive(30, 3))]
    K = linalg.Kronecker(*factors[0]) + linalg.Kronecker(*factors[1])
    A = K + 0.01 * linalg.Identity(1200, dtype=torch.float64, device=device)
    b = randn(1200, 2).to(device)
    found = linalg.cg(A, b, tol=1e-10)
    dense = sum(reference.kron(a.to_dense(), c.to_dense()) for a, c in factors)
    exact = torch.linalg.solve(reference.damped(dense, 0.01), b)
    assert found.converged.all()
    torch.testing.assert_close(found.solution, exact, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(A.solve(b), exact, rtol=1e-4, atol=1e-4)
