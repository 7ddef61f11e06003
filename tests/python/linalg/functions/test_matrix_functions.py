"""Roots, powers and eigenvalues against float64, in multiples of LAPACK's own error."""

import math
import platform
import time
from pathlib import Path

import pytest
import torch
import torchium
from hypothesis import given
from hypothesis import strategies as st
from reference.matrix_functions import (
    damped_power,
    from_spectrum,
    inverse_root_residual,
    newton_bound,
    relative_error,
    symmetric_part,
)
from torch.library import opcheck
from torchium.linalg import InverseRootInfo, eigh, matrix_inverse_root, matrix_power

ops = torch.ops.torchium
REAL = [torch.float32, torch.float64]
HALF = [torch.float16, torch.bfloat16]
METHODS = ["eigh", "newton", "auto"]

SPECTRA = {
    "log_uniform": lambda n: torch.logspace(0, -3, n, dtype=torch.float64),
    "identity": lambda n: torch.ones(n, dtype=torch.float64),
    "clustered": lambda n: torch.where(torch.arange(n) % 2 == 0, 1.0, 1e-2).double(),
    "one_huge": lambda n: torch.where(torch.arange(n) == 0, 1.0, 1e-3).double(),
    "rank_deficient": lambda n: torch.where(torch.arange(n) <= n // 3, 1.0, 0.0).double(),
    "zero": lambda n: torch.zeros(n, dtype=torch.float64),
}


def lapack_root_error(A, root, damping, floor):
    """Error of the root by torch.linalg.eigh in the dtype of A, with the same floor."""
    values, Q = torch.linalg.eigh(symmetric_part(A).to(A.dtype).cpu())
    damped = torch.maximum(values.double() + damping, floor.double().unsqueeze(-1))
    X = (Q * damped.pow(-1 / root).to(A.dtype).unsqueeze(-2)) @ Q.mT
    return relative_error(X, damped_power(A.cpu(), -1 / root, eps=damping, floor=floor))


def rounding(dtype):
    return torch.finfo(dtype).eps


# Accuracy


@pytest.mark.parametrize("root", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("n", [1, 2, 7, 64, 200])
def test_inverse_root_is_as_accurate_as_lapack(device, n, dtype, method, root):
    eps = 1e-3
    A = from_spectrum(torch.logspace(0, -5, n, dtype=torch.float64)).to(device, dtype)
    X, info = matrix_inverse_root(A, root, eps=eps, method=method, return_info=True)
    expected = damped_power(A.cpu(), -1 / root, eps=eps)
    # A backward stable method has an error of u / eps.
    allowed = 4 * lapack_root_error(A, root, eps, torch.zeros(())) + 20 * rounding(dtype) / eps
    assert relative_error(X, expected) <= allowed
    assert torch.equal(X, X.mT)
    assert info.residual <= 100 * root * rounding(dtype) / eps


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("root", [100, 256, 257, 10**6, 2**40])
def test_large_roots_take_no_longer_than_others(device, root, method):
    A = from_spectrum(torch.logspace(0, -5, 64, dtype=torch.float64)).to(device)
    start = time.process_time()
    X, info = matrix_inverse_root(A, root, eps=1e-3, method=method, return_info=True)
    assert time.process_time() - start < 20  # it was minutes
    assert relative_error(X, damped_power(A.cpu(), -1 / root, eps=1e-3)) < 1e-9
    iterates = method == "newton" or (method == "auto" and device.type == "cuda")
    assert (info.iterations > 0) == (iterates and root <= 256)
    assert matrix_inverse_root(A.float(), root, eps=1e-3, method=method).isfinite().all()


@pytest.mark.parametrize("exponent", [-1e-6, -1e-12, -(2.0**-40)])
def test_small_exponents_of_shampoo(device, exponent):
    weight = torch.nn.Parameter(torch.ones(32, 32, device=device))
    optimizer = torchium.Shampoo([weight], lr=0.1, exponent=exponent, update_freq=1)
    start = time.process_time()
    for _ in range(4):
        weight.grad = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).to(device)
        optimizer.step()
    optimizer.check_errors()
    assert time.process_time() - start < 20
    assert weight.isfinite().all()


@pytest.mark.parametrize("root", [2, 4])
def test_newton_is_more_accurate_than_lapack_in_float32(device, root):
    A = from_spectrum(torch.logspace(0, -8, 384, dtype=torch.float64)).to(device, torch.float32)
    X = matrix_inverse_root(A, root, eps=1e-4, method="newton")
    error = relative_error(X, damped_power(A.cpu(), -1 / root, eps=1e-4))
    assert error < 0.5 * lapack_root_error(A, root, 1e-4, torch.zeros(()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", REAL)
def test_relative_eps_is_in_units_of_s(device, dtype, method):
    A = 7 * from_spectrum(torch.logspace(0, -4, 33, dtype=torch.float64)).to(device, dtype)
    X, info = matrix_inverse_root(A, 4, relative_eps=0.01, method=method, return_info=True)
    s = newton_bound(A.cpu()) if info.iterations > 0 else None
    expected = damped_power(A.cpu(), -0.25, relative_eps=0.01, s=s)
    assert relative_error(X, expected) < 1e3 * rounding(dtype)


@pytest.mark.parametrize("exponent", [-2.0, -1.0, -0.5, -0.3, 0.0, 0.25, 0.5, 1.0, 1.7, 2.0, 3.0])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("n", [1, 5, 64])
def test_matrix_power(device, n, dtype, exponent):
    A = from_spectrum(torch.logspace(0, -2, n, dtype=torch.float64)).to(device, dtype)
    X = matrix_power(A, exponent, eps=1e-2, relative_eps=1e-2)
    expected = damped_power(A.cpu(), exponent, eps=1e-2, relative_eps=1e-2)
    # u times the condition of the power, which is at most |exponent| * 50 here.
    assert relative_error(X, expected) < 1e3 * (1 + abs(exponent)) * rounding(dtype)
    assert torch.equal(X, X.mT)


@pytest.mark.parametrize(
    "exponent", [-2.0, -1.0, -2 / 3, -0.5, -0.25, -0.3, 0.0, 0.5, 1.0, 2.0, 3.0, 7.0, 16.0, 17.0]
)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("n", [1, 5, 64, 200])
def test_matrix_power_without_relative_eps(device, n, dtype, exponent):
    """By products and inverse roots, where these are faster."""
    A = from_spectrum(torch.logspace(0, -2, n, dtype=torch.float64).expand(3, n)).to(device, dtype)
    A = A * torch.tensor([1.0, 0.1, 10.0], device=device, dtype=dtype).view(3, 1, 1)
    A[:, 0, n - 1] *= 1.001  # not quite symmetric
    X = matrix_power(A, exponent, eps=1e-4)
    expected = damped_power(A.cpu(), exponent, eps=1e-4)
    assert (relative_error(X, expected) < 1e3 * (1 + abs(exponent)) * rounding(dtype)).all()
    assert torch.equal(X, X.mT)
    again = matrix_power(A.requires_grad_(), exponent, eps=1e-4)  # by eigenvalues
    assert (relative_error(again, expected) < 1e3 * (1 + abs(exponent)) * rounding(dtype)).all()


@pytest.mark.parametrize("exponent", [-2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 8.0])
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-18, 1e18, 1e30, 1e37])
def test_powers_at_the_ends_of_the_range(device, scale, exponent):
    A = from_spectrum(torch.logspace(0, -2, 40, dtype=torch.float64))
    A = (scale * A).float().to(device)
    X = matrix_power(A, exponent)
    assert X.isfinite().all()
    largest = 1.0 / torch.finfo(torch.float32).tiny
    expected = damped_power(A.cpu(), exponent)
    in_range = (expected.abs().amax() < largest / 1e3) & (expected.abs().amax() > 1e3 / largest)
    if in_range and scale > 1e-40:
        assert relative_error(X, expected) < 5e-3 * (1 + abs(exponent)) ** 2
    A[3, 3] = torch.nan
    assert matrix_power(A, exponent).isnan().all()


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 7])
def test_integer_powers_of_indefinite_matrices(device, exponent):
    A = from_spectrum(torch.linspace(-1, 1.2, 12, dtype=torch.float64)).to(device)
    expected = torch.linalg.matrix_power(A.cpu(), exponent)
    assert relative_error(matrix_power(A, exponent), expected) < 1e-13


def test_other_powers_take_negative_eigenvalues_as_zero(device):
    A = from_spectrum(torch.tensor([-0.5, 0.25, 1.0])).to(device)
    expected = damped_power(A.cpu(), 0.5, floor=torch.zeros(()))
    assert relative_error(matrix_power(A, 0.5), expected) < 1e-14


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("shape", [(1,), (8,), (3, 5), (2, 3, 40), (70, 4)])
def test_eigh(device, shape, dtype):
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(*shape, shape[-1], dtype=torch.float64, generator=generator).to(device, dtype)
    values, Q = eigh(A)
    S = symmetric_part(A.cpu())
    n = shape[-1]
    tolerance = 10 * n * rounding(dtype)
    assert values.shape == shape
    assert Q.shape == A.shape
    assert (values.diff(dim=-1) >= 0).all()
    Q, values = Q.double().cpu(), values.double().cpu()
    norms = torch.linalg.matrix_norm(S)
    assert (torch.linalg.matrix_norm(S @ Q - Q * values.unsqueeze(-2)) <= tolerance * norms).all()
    assert (torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(n)) <= tolerance).all()


@pytest.mark.parametrize("method", METHODS)
def test_info_reports_the_residual(device, method):
    A = from_spectrum(torch.logspace(0, -3, 20, dtype=torch.float64)).to(device, torch.float32)
    X, info = matrix_inverse_root(A, 2, eps=1e-2, method=method, return_info=True)
    assert isinstance(info, InverseRootInfo)
    damping = torch.tensor(1e-2, dtype=torch.float64)
    expected = inverse_root_residual(A.cpu(), X.cpu(), 2, damping)
    assert 1e-8 < expected < 1e-4
    assert abs(info.residual.cpu() - expected) < 0.01 * expected
    assert info.iterations.dtype == torch.int64
    if method != "auto":
        assert (info.iterations > 0) == (method == "newton")


def has_fast_products() -> bool:
    """MKL has slower products on non-Intel processors."""
    if platform.machine() != "x86_64" or not torch.backends.mkl.is_available():
        return True
    return "GenuineIntel" in Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize(
    ("count", "n", "root", "dtype", "by_newton"),
    [
        (32, 32, 4, torch.float32, True),
        (32, 96, 4, torch.float32, has_fast_products()),
        (3, 64, 4, torch.float32, has_fast_products()),
        (32, 64, 8, torch.float32, has_fast_products()),
        (2, 64, 4, torch.float32, False),
        (8, 16, 4, torch.float32, False),
        (32, 128, 4, torch.float32, False),
        (32, 96, 6, torch.float32, False),
        (32, 32, 16, torch.float32, False),
        (32, 64, 4, torch.float64, False),
    ],
)
def test_auto_takes_the_faster_method_on_a_cpu(count, n, root, dtype, by_newton):
    A = from_spectrum(SPECTRA["log_uniform"](n).expand(count, n)).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        X, info = matrix_inverse_root(A, root, return_info=True)
        assert (info.iterations > 0).tolist() == [by_newton] * count
        method = "newton" if by_newton else "eigh"
        assert torch.equal(X, matrix_inverse_root(A, root, method=method))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("n", [40, 640])  # threaded LAPACKs split the work of large matrices
def test_eigh_shares_matrices_out_among_threads(n, dtype):
    A = from_spectrum(SPECTRA["log_uniform"](n).expand(4, n)).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        values, Q = eigh(A)
    finally:
        torch.set_num_threads(before)
    tolerance = n * torch.finfo(dtype).eps
    torch.testing.assert_close(A @ Q, Q * values.unsqueeze(-2), rtol=0, atol=tolerance)
    identity = torch.eye(n, dtype=dtype).expand_as(A)
    torch.testing.assert_close(Q.mT @ Q, identity, rtol=0, atol=tolerance)


# Any finite symmetric matrix has a finite root


@given(
    n=st.integers(1, 40),
    batch=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    spectrum=st.sampled_from(sorted(SPECTRA)),
    magnitude=st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 1e30, 1e37]),
    root=st.integers(1, 9),
    relative_eps=st.sampled_from([0.0, 1e-6, 1e-2]),
    method=st.sampled_from(METHODS),
    dtype=st.sampled_from(REAL),
)
def test_every_spectrum(n, batch, spectrum, magnitude, root, relative_eps, method, dtype):
    values = (SPECTRA[spectrum](n) * magnitude).expand(*batch, n)
    A = from_spectrum(values).to(dtype)
    X, info = matrix_inverse_root(
        A, root, relative_eps=relative_eps, method=method, return_info=True
    )
    assert X.isfinite().all()
    assert info.residual.isfinite().all()
    assert (info.floor > 0).all()
    assert torch.equal(X, X.mT)
    s = torch.where(
        info.iterations > 0, newton_bound(A), torch.linalg.eigvalsh(A.double())[..., -1]
    )
    damping = relative_eps * s.clamp(min=0)
    # Perturbing A by its rounding errors, `noise`, changes eigenvalues near the floor by 100 %; those well
    # above it must be correct.
    noise = 64 * rounding(dtype) * max(1.0, math.sqrt(n) / 4)
    lowest = (torch.linalg.eigvalsh(A.double())[..., :1].squeeze(-1) + damping).clamp(min=0)
    condition = s / torch.maximum(lowest, info.floor.double())
    expected = damped_power(A, -1 / root, relative_eps=relative_eps, s=s, floor=info.floor)
    well_above = lowest > 4 * info.floor
    error = relative_error(X, expected)
    assert (error[well_above] <= 10 * noise * condition[well_above]).all()
    # Elsewhere the result is bounded by that for the floor, to the documented factor of newton.
    bound = 64 * info.floor.double().pow(-1 / root)
    assert (torch.linalg.matrix_norm(X.double(), 2) <= bound).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-39, 1e-30, 1e30, 3e38])
def test_extreme_magnitudes_stay_finite(device, magnitude, dtype, method):
    for A in (torch.ones(6, 6, dtype=dtype), torch.eye(6, dtype=dtype)):
        A = (A * magnitude).to(device)
        for root in (1, 2, 4):
            assert matrix_inverse_root(A, root, method=method).isfinite().all()
        for exponent in (-3.0, -0.5, 0.5, 3.0):
            assert matrix_power(A, exponent).isfinite().all()
        assert all(t.isfinite().all() for t in eigh(A))


@pytest.mark.parametrize("dtype", REAL)
def test_scale_equivariance(device, dtype):
    A = from_spectrum(torch.logspace(0, -2, 10, dtype=torch.float64)).to(device, dtype)
    X = matrix_inverse_root(A, 2)
    for exponent in (-100, 100):
        scaled = matrix_inverse_root(A * 2.0**exponent, 2)
        assert torch.allclose(scaled * 2.0 ** (exponent / 2), X, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_rank_deficient_matrix_has_the_root_at_the_floor(device, method):
    A = from_spectrum(SPECTRA["rank_deficient"](30)).to(device)
    X, info = matrix_inverse_root(A, 4, method=method, return_info=True)
    largest = torch.linalg.eigvalsh(X)[-1]
    at_floor = info.floor**-0.25
    assert at_floor / 1.1 <= largest <= 4.5 * at_floor
    # The floor does not affect the remaining part.
    assert torch.linalg.matrix_norm(A @ X @ X @ X @ X @ A - A) < 1e-2 * torch.linalg.matrix_norm(A)


def test_newton_is_replaced_by_eigh_for_indefinite_matrices_on_a_cpu():
    A = from_spectrum(torch.linspace(-1, 1, 16, dtype=torch.float64))
    X, info = matrix_inverse_root(A, 4, method="newton", return_info=True)
    assert info.iterations == 0
    expected = damped_power(A, -0.25, floor=info.floor)
    assert relative_error(X, expected) < 1e-12


@pytest.mark.parametrize("root", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "below"), [(torch.float32, 6e-6), (torch.float64, 3e-15)])
def test_newton_is_replaced_by_eigh_where_its_result_is_finite_but_wrong(dtype, below, root):
    """For an eigenvalue a little below zero the iteration makes one that is far too large."""
    spectrum = torch.linspace(0.1, 1, 16, dtype=torch.float64)
    spectrum[0] = -below
    A = from_spectrum(spectrum).to(dtype)
    X, info = matrix_inverse_root(A, root, method="newton", return_info=True)
    assert info.iterations == 0
    largest = torch.linalg.eigvalsh(X.double())[-1]
    assert largest == pytest.approx(float(info.floor) ** (-1 / root), rel=1e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", METHODS)
def test_non_finite_matrices_do_not_touch_their_neighbours(device, method, value):
    # The iteration on a CPU shifts matrices in memory, and some BLAS libraries round differently depending on
    # alignment: at order 16 all are aligned alike.
    n = 16 if method == "newton" and device.type == "cpu" else 9
    A = from_spectrum(SPECTRA["log_uniform"](n).expand(3, n)).to(device, torch.float32)
    clean = matrix_inverse_root(A, 4, eps=1e-3, method=method)
    powers, (values, vectors) = matrix_power(A, -0.5), eigh(A)
    A[1, 4, 2] = value
    X, info = matrix_inverse_root(A, 4, eps=1e-3, method=method, return_info=True)
    assert X[1].isnan().all()
    assert info.residual[1].isnan()
    assert info.floor[1].isnan()
    assert matrix_power(A, -0.5)[1].isnan().all()
    assert all(t[1].isnan().all() for t in eigh(A))
    for i in (0, 2):
        assert torch.equal(X[i], clean[i])
        assert torch.equal(matrix_power(A, -0.5)[i], powers[i])
        assert torch.equal(eigh(A)[0][i], values[i])
        assert torch.equal(eigh(A)[1][i], vectors[i])


# Shapes and dtypes


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 3, 3), (2, 0, 4, 4), (1, 2, 3, 5, 5)])
@pytest.mark.parametrize("method", METHODS)
def test_shapes(device, shape, method):
    A = torch.zeros(shape, device=device)
    X, info = matrix_inverse_root(A, 2, eps=1.0, method=method, return_info=True)
    assert X.shape == matrix_power(A, 0.5).shape == shape
    assert all(t.shape == shape[:-2] for t in info)
    values, Q = eigh(A)
    assert values.shape == shape[:-1]
    assert Q.shape == shape
    expected = torch.eye(shape[-1], device=device).expand(shape)
    torch.testing.assert_close(X, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_computed_in_float32(device, dtype):
    A = from_spectrum(torch.logspace(0, -2, 12, dtype=torch.float64)).to(device, dtype)
    X, info = matrix_inverse_root(A, 4, eps=1e-2, return_info=True)
    assert X.dtype == dtype
    assert info.residual.dtype == info.floor.dtype == torch.float32
    assert torch.equal(X, matrix_inverse_root(A.float(), 4, eps=1e-2).to(dtype))
    assert torch.equal(matrix_power(A, 0.5), matrix_power(A.float(), 0.5).to(dtype))
    assert eigh(A)[0].dtype == eigh(A)[1].dtype == dtype
    saturated = matrix_inverse_root(torch.zeros(3, 3, dtype=dtype, device=device), 1)
    assert saturated.isfinite().all()
    assert saturated[0, 0] > 6e4


@pytest.mark.parametrize("method", METHODS)
def test_non_symmetric_input_is_symmetrised(device, method):
    generator = torch.Generator().manual_seed(3)
    B = torch.randn(4, 10, 10, dtype=torch.float64, generator=generator).to(device)
    A = B @ B.mT
    skew = B - B.mT
    X = matrix_inverse_root(A, 2, eps=0.1, method=method)
    assert torch.allclose(matrix_inverse_root(A + skew, 2, eps=0.1, method=method), X, rtol=1e-9)
    assert torch.allclose(matrix_power(A + skew, -0.5, eps=0.1), X, rtol=1e-9)


def test_strided_input_is_not_changed(device):
    B = torch.randn(7, 5, 7, 2, device=device).permute(3, 1, 0, 2)
    before = B.clone()
    X = matrix_inverse_root(B, 4, eps=30.0)
    assert torch.equal(B, before)
    assert torch.equal(X, matrix_inverse_root(B.contiguous(), 4, eps=30.0))


def test_a_result_does_not_depend_on_neighbours_or_runs(device):
    A = from_spectrum(SPECTRA["log_uniform"](48).expand(5, 48), seed=4).to(device, torch.float32)
    A = A * torch.tensor([1.0, 1e-3, 1e2, 1.0, 7.0], device=device)[:, None, None]
    for method in ("eigh", "newton"):
        X = matrix_inverse_root(A, 4, eps=1e-4, method=method)
        assert torch.equal(X, matrix_inverse_root(A, 4, eps=1e-4, method=method))
        alone = matrix_inverse_root(A[2], 4, eps=1e-4, method=method)
        assert relative_error(X[2], alone.double().cpu()) < 1e-3


# Errors


@pytest.mark.parametrize("function", [matrix_inverse_root, matrix_power])
@pytest.mark.parametrize("name", ["eps", "relative_eps"])
@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf")])
def test_damping_must_be_finite_and_not_negative(function, name, value):
    with pytest.raises(ValueError, match=rf"\b{name} is {value}"):
        function(torch.eye(3), 2, **{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"root": 0}, "root is 0"),
        ({"root": -4}, "root is -4"),
        ({"root": 2, "method": "cholesky"}, "method is 'cholesky'"),
    ],
)
def test_bad_inverse_root_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        matrix_inverse_root(torch.eye(3), **arguments)


@pytest.mark.parametrize("exponent", [float("nan"), float("inf")])
def test_bad_exponents(exponent):
    with pytest.raises(ValueError, match=f"exponent is {exponent}"):
        matrix_power(torch.eye(3), exponent)


@pytest.mark.parametrize(
    "call", [lambda A: matrix_inverse_root(A, 2), lambda A: matrix_power(A, 0.5), eigh]
)
@pytest.mark.parametrize(
    ("A", "message"),
    [
        (torch.zeros(3), r"shape \[3\]"),
        (torch.zeros(2, 3), r"shape \[2, 3\]"),
        (torch.zeros(4, 2, 3), r"shape \[4, 2, 3\]"),
        (torch.eye(3).int(), "dtype Int"),
        (torch.eye(3).to(torch.complex64), "dtype ComplexFloat"),
        (torch.eye(3).to_sparse(), "dense"),
    ],
)
def test_bad_matrices(call, A, message):
    with pytest.raises(ValueError, match=message):
        call(A)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [(lambda A: matrix_inverse_root(A, 2), "matrix_power"), (eigh, "torch.linalg.eigh")],
)
def test_operators_without_derivative_refuse_gradients(call, remedy):
    A = torch.eye(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"A requires grad.*{remedy}"):
        call(A)
    with torch.no_grad():
        call(A)
    call(A.detach())


# Autograd


@pytest.mark.parametrize("relative_eps", [0.0, 0.1])
@pytest.mark.parametrize("exponent", [-2.0, -0.25, 0.0, 0.5, 1.0, 1.3, 2.0, 3.0])
def test_gradient_of_matrix_power(exponent, relative_eps):
    A = from_spectrum(torch.tensor([[0.5, 1.0, 1.5, 4.0], [0.3, 0.4, 2.0, 3.0]]))
    function = lambda A: matrix_power(A, exponent, eps=0.1, relative_eps=relative_eps)  # noqa: E731
    assert torch.autograd.gradcheck(function, A.requires_grad_())


def test_gradient_at_coinciding_eigenvalues():
    for A in (torch.eye(4, dtype=torch.float64), from_spectrum(torch.tensor([1.0, 2.0, 2.0, 2.0]))):
        A.requires_grad_()
        assert torch.autograd.gradcheck(lambda A: matrix_power(A, -0.5), A)


@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.0])
def test_gradient_of_integer_powers_of_indefinite_matrices(exponent):
    A = from_spectrum(torch.tensor([-2.0, -1.0, 0.0, 1.5])).requires_grad_()
    assert torch.autograd.gradcheck(lambda A: matrix_power(A, exponent), A)


@pytest.mark.parametrize("exponent", [-0.5, 0.5, 2.0])
def test_gradient_of_singular_matrices_is_finite(exponent):
    A = from_spectrum(SPECTRA["rank_deficient"](6)).requires_grad_()
    matrix_power(A, exponent).sum().backward()
    assert A.grad.isfinite().all()


def test_second_derivative_is_refused():
    A = torch.eye(3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(matrix_power(A, 0.5).sum(), A, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        gradient.sum().backward()


def test_gradient_in_half_precision():
    A = torch.eye(3, dtype=torch.bfloat16, requires_grad=True)
    matrix_power(A, -1.0).sum().backward()
    assert A.grad.dtype == torch.bfloat16
    assert torch.allclose(A.grad, -torch.ones_like(A.grad))


# Operators


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((torch.float32, shape) for shape in ((3, 3), (0, 2, 2), (2, 1, 4, 4))),
        *((dtype, (2, 1, 4, 4)) for dtype in (torch.float64, torch.bfloat16)),
    ],
)
def test_opcheck(device, dtype, shape):
    A = torch.eye(shape[-1], device=device, dtype=dtype).expand(shape).contiguous()
    for method in METHODS:
        arguments, options = (A, 4), {"eps": 1e-2, "method": method}
        opcheck(ops.matrix_inverse_root.default, arguments, options)
        opcheck(ops.matrix_inverse_root_info.default, arguments, options)
    opcheck(ops.eigh.default, (A,))
    opcheck(ops.matrix_power.default, (A, -0.5), {"eps": 1e-2})
    opcheck(ops.matrix_power.default, (A.clone().requires_grad_(), 1.5), {"relative_eps": 1e-2})


def test_compiled_function_matches_eager():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(A):
        return (matrix_power(A, -0.5, eps=0.1) @ matrix_inverse_root(A.detach(), 4)).sum()

    A = from_spectrum(SPECTRA["log_uniform"](5)).requires_grad_()
    loss(A).backward()
    compiled, A.grad = A.grad, None
    (matrix_power(A, -0.5, eps=0.1) @ matrix_inverse_root(A.detach(), 4)).sum().backward()
    assert torch.equal(compiled, A.grad)


def test_autocast_does_not_lower_the_precision(device):
    A = from_spectrum(SPECTRA["log_uniform"](20)).to(device, torch.float32)
    for method in ("eigh", "newton"):
        expected = matrix_inverse_root(A, 4, eps=1e-3, method=method)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            X = matrix_inverse_root(A, 4, eps=1e-3, method=method)
        assert X.dtype == torch.float32
        assert torch.equal(X, expected)


@pytest.mark.cuda
def test_tf32_does_not_lower_the_precision():
    A = from_spectrum(torch.logspace(0, -6, 200, dtype=torch.float64)).float().cuda()
    expected = damped_power(A.cpu(), -0.25, eps=1e-4)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for method in ("eigh", "newton"):
            X, info = matrix_inverse_root(A, 4, eps=1e-4, method=method, return_info=True)
            assert relative_error(X, expected) < 2e-3
            assert (info.iterations > 0) == (method == "newton")
    finally:
        torch.set_float32_matmul_precision(before)


def test_public_names():
    assert torchium.linalg.matrix_inverse_root is matrix_inverse_root
