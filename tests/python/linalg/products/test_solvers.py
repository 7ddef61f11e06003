"""spd_inverse, spd_solve, kron_solve: finite, and as accurate as LAPACK."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_waits import no_waits
from hypothesis import given
from hypothesis import strategies as st
from matrix_cases import (
    ALL_FLOATS,
    FLOATS,
    SCALES,
    SPECTRA,
    eps,
    floor,
    norm,
    randn,
    rounding,
    symmetric,
)
from reference import products as reference
from torch import Tensor
from torchium import linalg


def check_residual(A: Tensor, X: Tensor, solution: Tensor, least: float) -> None:
    """A X = B up to backward error, with eigenvalues below `least` counted as `least`."""
    A, X, solution = A.double(), X.double(), solution.double()
    n = A.shape[-1]
    unit = floor(n, torch.float32 if least > 1e-12 * norm(A).max() else torch.float64)
    residual = norm(A @ solution - X)
    largest = norm(A)
    bound = 8 * n * unit * (largest * norm(solution) + norm(X)) + 2 * least * norm(solution)
    assert (residual <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
@given(
    kind=st.sampled_from(SPECTRA),
    scale=st.sampled_from(SCALES),
    n=st.integers(1, 20),
    seed=st.integers(0, 50),
)
def test_spd_is_finite_and_has_a_small_residual(dtype, kind, scale, n, seed):
    A = symmetric(kind, n, scale, seed).to(dtype)
    X = randn(n, 3, dtype=dtype, seed=seed)
    inverse, solution = linalg.spd_inverse(A), linalg.spd_solve(A, X)
    assert inverse.isfinite().all()
    assert solution.isfinite().all()
    assert torch.equal(inverse, inverse.mT)
    if kind == "zero":
        tiny = torch.finfo(dtype).tiny
        assert torch.equal(inverse, torch.eye(n, dtype=dtype) / tiny)
        return
    least = floor(n, dtype) * float(torch.linalg.matrix_norm(A.double(), 2))
    assert norm(inverse) <= 4 * math.sqrt(n) / least
    if scale < 1 and kind in ("rank_deficient", "one_huge"):
        return  # the result may saturate at the largest number
    check_residual(A, torch.eye(n, dtype=dtype), inverse, least)
    check_residual(A, X, solution, least)


def allowed_error(lapack: Tensor, exact: Tensor, A: Tensor, dtype: torch.dtype) -> Tensor:
    """Four times LAPACK's own error in the same dtype, plus the rounding of input and result."""
    n = A.shape[-1]
    # The reference is float64 as well: no better than backward stable.
    own = floor(n, dtype) * torch.linalg.cond(A) if dtype == torch.float64 else n * eps(dtype)
    return 4 * norm(lapack - exact) + (4 * own + 4 * rounding(dtype)) * norm(exact)


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@pytest.mark.parametrize("damping", [0.0, 1e-3, 10.0])
@pytest.mark.parametrize("n", [1, 7, 33, 64, 100, 200, 256])
def test_spd_is_as_accurate_as_lapack(dtype, damping, n, device):
    A = symmetric("spread", n, batch=(2, 3)).to(dtype).to(device)
    X = randn(3, n, 4, dtype=dtype, seed=1).to(device)
    damped = reference.damped(A, damping)
    compute = torch.float32 if dtype.itemsize == 2 else dtype

    exact, lapack = reference.spd_inverse(A, damping), torch.linalg.inv(damped.to(compute))
    inverse = linalg.spd_inverse(A, damping=damping)
    assert (norm(inverse - exact) <= allowed_error(lapack, exact, damped, dtype)).all()

    exact = reference.spd_solve(A, X, damping)
    lapack = torch.linalg.solve(damped.to(compute), X.to(compute))
    solution = linalg.spd_solve(A, X, damping=damping)
    assert solution.shape == (2, 3, n, 4)
    assert solution.dtype == dtype
    assert (norm(solution - exact) <= allowed_error(lapack, exact, damped, dtype)).all()


def test_a_singular_or_non_finite_matrix_leaves_the_others_alone(device):
    good = symmetric("spread", 5).float().to(device)
    broken = torch.full((5, 5), math.nan, device=device)
    stack = torch.stack([good, torch.zeros_like(good), broken, torch.ones_like(good), -good])
    X = randn(5, 2, dtype=torch.float32).to(device)
    for result, alone in [
        (linalg.spd_inverse(stack), linalg.spd_inverse(good)),
        (linalg.spd_solve(stack, X), linalg.spd_solve(good, X)),
        (
            linalg.kron_solve(stack, torch.ones(1, 1, device=device), X, 0.0),
            linalg.kron_solve(good, torch.ones(1, 1, device=device), X, 0.0),
        ),
    ]:
        # Rounding errors of a condition number of 1000 differ with the size of a batch.
        torch.testing.assert_close(result[0], alone, rtol=0, atol=1e-4 * float(alone.abs().max()))
        assert result[[1, 3, 4]].isfinite().all()
        assert result[2].isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("n", [20, 200])
def test_spd_does_not_wait_in_float32(n):
    A = symmetric("spread", n, batch=(3,)).float().cuda()
    X = randn(n, 2, dtype=torch.float32).cuda()
    functions = [
        lambda: linalg.spd_inverse(A, damping=1e-3),
        lambda: linalg.spd_solve(A, X),
        lambda: linalg.spd_inverse(A.bfloat16()),
    ]
    expected = [function() for function in functions]
    with no_waits():
        found = [function() for function in functions]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    A[1, 2, 3] = torch.nan
    assert linalg.spd_inverse(A).isnan().flatten(1).all(1).tolist() == [False, True, False]


@pytest.mark.cuda
@pytest.mark.parametrize("n", [3, 32, 100, 129, 256])
def test_singular_matrices_are_left_to_the_coupled_iteration(n):
    """With a step of Newton's method; the others are swept."""
    regular = symmetric("spread", n, batch=(3,)).float().cuda()
    singular = symmetric("rank_deficient", n, batch=(2,), seed=1).float().cuda()
    A = torch.stack([regular[0], singular[0], regular[1], singular[1], regular[2]])
    inverse = linalg.spd_inverse(A)
    assert torch.equal(inverse[[0, 2, 4]], linalg.spd_inverse(regular))
    X = linalg.matrix_inverse_root(singular, 1).double()
    expected = 2 * X - X @ singular.double() @ X
    error = norm(inverse[[1, 3]].double().cpu() - expected.cpu())
    assert (error <= 1e-3 * norm(expected.cpu())).all()


@pytest.mark.cuda
@pytest.mark.parametrize(("n", "batch"), [(20, 30), (260, 3), (260, 300)])
def test_spd_takes_any_memory_layout_on_a_gpu(n, batch):
    """Neither rows nor columns of the matrices are contiguous."""
    A = symmetric("spread", n, batch=(batch,)).float().cuda()
    X = randn(n, 2, dtype=torch.float32).cuda()
    interleaved = A.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert torch.equal(linalg.spd_inverse(interleaved), linalg.spd_inverse(A))
    assert torch.equal(linalg.spd_solve(interleaved, X), linalg.spd_solve(A, X))


@pytest.mark.cuda
@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1.0, 1e30, 1e37])
@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("n", [20, 200])
def test_spd_is_finite_on_a_gpu(n, kind, scale):
    A = symmetric(kind, n, scale).float().cuda()
    X = randn(n, 3, dtype=torch.float32).cuda()
    inverse, solution = linalg.spd_inverse(A), linalg.spd_solve(A, X)
    assert inverse.isfinite().all()
    assert solution.isfinite().all()
    assert torch.equal(inverse, inverse.mT)


def test_non_symmetric_input_is_symmetrised():
    A = randn(6, 6) + 10 * torch.eye(6)
    X = randn(6, 2, seed=1)
    S = (A + A.mT) / 2
    torch.testing.assert_close(linalg.spd_inverse(A), linalg.spd_inverse(S))
    torch.testing.assert_close(linalg.spd_solve(A, X), linalg.spd_solve(S, X))
    B = torch.ones(1, 1).double()
    torch.testing.assert_close(linalg.kron_solve(A, B, X, 0.1), linalg.kron_solve(S, B, X, 0.1))


def test_float16_saturates():
    A = torch.diag(torch.tensor([1.0, 0.0])).half()
    limit = torch.finfo(torch.float16).max
    assert linalg.spd_inverse(A).diagonal().tolist() == [1.0, limit]
    assert linalg.spd_solve(A, torch.ones(2, 1).half()).flatten().tolist() == [1.0, limit]


@pytest.mark.parametrize("dtype", FLOATS)
@given(
    kinds=st.tuples(st.sampled_from(SPECTRA), st.sampled_from(SPECTRA)),
    scales=st.tuples(st.sampled_from(SCALES), st.sampled_from(SCALES)),
    nA=st.integers(1, 6),
    nB=st.integers(1, 6),
    damping=st.sampled_from([0.0, 1e-30, 1e-3, 1e30]),
    seed=st.integers(0, 50),
)
def test_kron_solve_is_finite(dtype, kinds, scales, nA, nB, damping, seed):
    A = symmetric(kinds[0], nA, scales[0], seed).to(dtype)
    B = symmetric(kinds[1], nB, scales[1], seed + 1).to(dtype)
    X = randn(nA * nB, 2, dtype=dtype, seed=seed)
    solution = linalg.kron_solve(A, B, X, damping)
    assert solution.isfinite().all()
    product = reference.kron(A, B)
    largest = float(torch.linalg.matrix_norm(product, 2)) + damping
    least = 2 * floor(max(nA, nB), dtype) * largest
    tiny = 1e3 * torch.finfo(dtype).tiny
    if least > tiny and largest < 1 / tiny:  # otherwise the result saturates or vanishes
        check_residual(reference.damped(product, damping), X, solution, least)


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@pytest.mark.parametrize("damping", [1e-4, 1e-2, 10.0])
def test_kron_solve_is_as_accurate_as_lapack(dtype, damping, device):
    A = symmetric("spread", 6, batch=(2, 1)).to(dtype).to(device)
    B = symmetric("clustered", 9, seed=1, batch=(3,)).to(dtype).to(device)
    X = randn(3, 54, 4, dtype=dtype, seed=1).to(device)
    compute = torch.float32 if dtype.itemsize == 2 else dtype
    exact = reference.kron_solve(A, B, X, damping)
    K = reference.damped(
        reference.kron(reference.damped(A, 0.0), reference.damped(B, 0.0)), damping
    )
    lapack = torch.linalg.solve(K.to(compute), X.to(compute))
    # Eigenvalues are accurate to a few units of the largest, and 1 / (d + damping) accordingly.
    condition = torch.linalg.cond(K)
    allowed = 4 * norm(lapack - exact) + 4 * (floor(9, dtype) * condition + rounding(dtype)) * norm(
        exact
    )
    solution = linalg.kron_solve(A, B, X, damping)
    assert solution.shape == (2, 3, 54, 4)
    assert solution.dtype == dtype
    assert (norm(solution - exact) <= allowed).all()
