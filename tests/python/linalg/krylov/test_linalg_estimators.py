"""Stochastic estimates of traces, diagonals and log-determinants, against their definitions."""

from __future__ import annotations

import math
import types

import pytest
import torch
import torchium
from reference import estimators as reference
from torch import Tensor

linalg = torchium.linalg
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def signs(n: int, columns: int, *, seed: int = 0, first: int = 0, device: str = "cpu") -> Tensor:
    return torch.ops.torchium.random_signs(
        n, columns, seed, first, torch.float64, torch.device(device)
    )


def positive(n: int = 60, decay: float = 0.8, device: str = "cpu") -> Tensor:
    torch.manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))
    return ((Q * (decay ** torch.arange(n).double() + 1e-3)) @ Q.T).to(device)


# ---- random signs


def test_signs_are_those_of_philox():
    """The known answer of Random123 for Philox4x32-10 at zero; a set top bit is -1."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    expected = torch.tensor([-1.0 if word >> 31 else 1.0 for word in words]).double()
    assert torch.equal(signs(4, 1)[:, 0], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 3, 4, 5, 1023])
def test_signs_depend_on_seed_stream_and_place_alone(device, n):
    whole = signs(n, 7, device=device)
    assert bool((whole.abs() == 1).all())
    for first in range(7):
        assert torch.equal(signs(n, 1, first=first, device=device), whole[:, first : first + 1])
    assert torch.equal(whole.cpu(), signs(n, 7))
    longer = signs(n + 5, 7, device=device)
    assert torch.equal(longer[:n], whole)


def test_signs_are_independent():
    many = signs(4096, 200)
    correlations = many.T @ many / 4096
    off_diagonal = correlations - torch.eye(200, dtype=torch.float64)
    assert off_diagonal.abs().max() <= 6 / 4096**0.5
    assert abs(many.mean()) <= 5 / many.numel() ** 0.5
    assert (signs(1000, 1, seed=1) != signs(1000, 1)).double().mean() > 0.4


# ---- against the definitions


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 7, 100])
def test_hutchinson_is_the_mean_over_signs(device, block_size):
    A, Z = positive(device=device), signs(60, 30, device=device)
    terms = Z * (A @ Z)
    trace = linalg.hutchinson_trace(A, num_samples=30, block_size=block_size)
    diagonal = linalg.hutchinson_diagonal(A, num_samples=30, block_size=block_size)
    for found, samples in ((trace, terms.sum(0)), (diagonal, terms)):
        mean, error = reference.mean_and_error(samples)
        torch.testing.assert_close(found.value, mean)
        torch.testing.assert_close(found.standard_error, error)
        assert found.products == 30


@pytest.mark.cuda
@pytest.mark.parametrize("order", [4096, 4101])
def test_wide_products_of_a_large_matrix_have_the_error_of_float32(order):
    A = torch.randn(order, order, generator=torch.Generator().manual_seed(0))
    A = (A * torch.logspace(-3, 3, order)).to("cuda")  # columns differ in magnitude
    A = A[torch.randperm(order, generator=torch.Generator().manual_seed(1)).to("cuda")]
    found = linalg.hutchinson_diagonal(A.mT, num_samples=300).value
    terms = signs(order, 300, device="cuda")
    exact = (terms.double() * (A.mT.double() @ terms.double())).mean(1)
    unit = A.double().norm(dim=0) / 300**0.5  # of the estimate's own error
    assert ((found - exact).abs() / unit).max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_hutchpp_is_its_definition(device):
    A = positive(device=device)
    found = linalg.hutchpp(A, num_products=32)
    mean, error = reference.hutchpp(A.cpu(), signs(60, 10), signs(60, 12, first=10))
    torch.testing.assert_close(found.value.cpu(), mean)
    torch.testing.assert_close(found.standard_error.cpu(), error)
    assert found.products == 32


@pytest.mark.parametrize("device", DEVICES)
def test_xdiag_leaves_one_sample_out_in_turn(device):
    A = positive(device=device)
    found = linalg.xdiag(A, num_products=24)
    mean, error = reference.xdiag(A.cpu(), signs(60, 12))
    torch.testing.assert_close(found.value.cpu(), mean)
    torch.testing.assert_close(found.standard_error.cpu(), error)
    assert found.products == 24


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_logdet_is_gauss_quadrature(device, block_size):
    A = positive(decay=0.95, device=device)
    found = linalg.logdet(A, num_samples=6, num_steps=12, block_size=block_size)
    samples = [reference.log_quadrature(A.cpu(), z, 12) for z in signs(60, 6).T]
    mean, error = reference.mean_and_error(torch.stack(samples))
    torch.testing.assert_close(found.value.cpu(), mean, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.standard_error.cpu(), error, rtol=1e-6, atol=0)
    assert found.products == 72


# ---- accuracy


def test_errors_fall_as_they_should():
    A = positive(n=400, decay=0.9)
    exact = A.trace()
    plain = linalg.hutchinson_trace(A, num_samples=99)
    better = linalg.hutchpp(A, num_products=99)
    assert abs(plain.value - exact) <= 5 * plain.standard_error
    assert abs(better.value - exact) <= 5 * better.standard_error
    assert better.standard_error < plain.standard_error / 10
    diagonal = linalg.hutchinson_diagonal(A, num_samples=100)
    sharper = linalg.xdiag(A, num_products=100)
    errors = [(found.value - A.diagonal()).norm() for found in (diagonal, sharper)]
    assert errors[1] < errors[0] / 5
    assert errors[0] <= 2 * diagonal.standard_error.norm()


def test_logdet_of_a_known_matrix():
    A = positive(n=300, decay=0.99)
    exact = torch.logdet(A)
    found = linalg.logdet(A, num_samples=50, num_steps=60)
    assert abs(found.value - exact) <= 4 * found.standard_error
    assert abs(found.value - exact) <= 0.03 * abs(exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_cases(dtype):
    D = torch.arange(1.0, 41.0, dtype=dtype)
    A = torch.diag(D)
    trace = linalg.hutchinson_trace(A, num_samples=3)
    torch.testing.assert_close(trace.value, D.double().sum())
    assert trace.standard_error == 0
    torch.testing.assert_close(linalg.hutchinson_diagonal(A, num_samples=3).value, D)
    # As many steps as dimensions: the quadrature is exact, and so is the mean over a diagonal's signs.
    found = linalg.logdet(A, num_samples=2, num_steps=40)
    torch.testing.assert_close(found.value, D.double().log().sum(), rtol=1e-4, atol=0)
    # A sketch that spans the whole space.
    B = positive(n=20).to(dtype)
    torch.testing.assert_close(linalg.hutchpp(B, num_products=99).value, B.trace().double())
    rank_two = B[:, :2] @ B[:, :2].T
    found = linalg.xdiag(rank_two, num_products=18)
    torch.testing.assert_close(found.value, rank_two.diagonal(), rtol=1e-3, atol=1e-4)


def test_an_invariant_space_ends_the_quadrature():
    """The identity: Lanczos' method ends after one step, and log 1 = 0."""
    assert abs(linalg.logdet(torch.eye(50).double(), num_samples=3).value) <= 1e-12
    found = linalg.logdet(3 * torch.eye(50), num_samples=3)
    torch.testing.assert_close(
        found.value, 50 * torch.tensor(3.0).double().log(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_logdet_of_huge_and_tiny_numbers(scale):
    A = torch.diag(torch.linspace(1, 2, 50, dtype=torch.float64))
    found = linalg.logdet(scale * A).value - 50 * math.log(scale)
    torch.testing.assert_close(found, linalg.logdet(A).value, rtol=1e-9, atol=0)


def test_logdet_of_an_indefinite_matrix_is_nan():
    A = torch.diag(torch.linspace(-1, 1, 50).double())
    assert bool(linalg.logdet(A).value.isnan())


def test_a_tolerance_stops_after_ten_products():
    A = positive(n=200, decay=0.99)
    found = linalg.hutchinson_trace(A, num_samples=10_000, block_size=4, tol=0.02)
    assert found.standard_error <= 0.02 * found.value
    assert found.products % 40 == 0
    assert found.products < 10_000
    exact = linalg.hutchinson_trace(torch.eye(200), num_samples=10_000, block_size=4, tol=0.02)
    assert exact.products == 40


ESTIMATES = [
    linalg.hutchinson_trace,
    linalg.hutchinson_diagonal,
    linalg.hutchpp,
    linalg.xdiag,
    linalg.logdet,
]


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_estimates_change_no_random_state(estimate):
    A = positive()
    state = torch.get_rng_state()
    estimate(A)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("estimate", [*ESTIMATES, "slogdet", "lanczos"])
def test_a_function_that_is_transformed_may_estimate(estimate):
    A = positive()
    if estimate == "slogdet":
        estimate = slogdet_by_samples
    elif estimate == "lanczos":
        estimate = eigenvalues_from_a_vector
    expected = estimate(A).value
    slope = torch.func.grad(lambda x: (x * estimate(A).value).sum())(torch.ones((), dtype=A.dtype))
    assert torch.allclose(slope, expected.sum())
    rows = torch.func.vmap(lambda x: x * estimate(A).value)(torch.ones(2, dtype=A.dtype))
    assert torch.allclose(rows, expected.expand_as(rows))


def slogdet_by_samples(A):
    products = linalg.LinearOperator(len(A), lambda X: A @ X, dtype=A.dtype)
    value = products.assume("positive_definite").slogdet(num_samples=5)[1]
    return types.SimpleNamespace(value=value)


def eigenvalues_from_a_vector(A):
    start = A[:, 0] + torch.zeros(len(A), dtype=A.dtype)  # of the transform
    return types.SimpleNamespace(value=linalg.lanczos(A, 2, start=start).eigenvalues)


@pytest.mark.parametrize("n", [1, 2, 3, 49, 51])
def test_defaults_fit_small_matrices(n):
    A = positive(n)
    found = linalg.xdiag(A)
    assert found.products == n
    torch.testing.assert_close(found.value, A.diagonal())
    assert not found.standard_error.any()
    for function in (linalg.hutchpp, linalg.logdet, linalg.hutchinson_trace):
        assert function(A).value.isfinite()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda A: linalg.hutchinson_trace(A, num_samples=0), "hutchinson_trace: num_samples is 0"),
        (
            lambda A: linalg.hutchinson_diagonal(A, block_size=0),
            "hutchinson_diagonal: block_size is",
        ),
        (lambda A: linalg.hutchinson_trace(A, tol=0.0), "tol is 0; it must be positive and finite"),
        (lambda A: linalg.hutchpp(A, num_products=2), "num_products is 2; it must be at least 3"),
        (lambda A: linalg.xdiag(A, num_products=7), "num_products is 7; it must be even"),
        (lambda A: linalg.xdiag(A, num_products=42), "at most 2 n = 40"),
        (lambda A: linalg.xdiag(A[:1, :1], num_products=4), "at least 2 and at most 2 n = 2"),
        (lambda A: linalg.logdet(A, num_steps=0), "logdet: num_steps is 0; it must be positive"),
        (lambda A: linalg.xdiag(linalg.Dense(A[None])), r"xdiag: A is \[1, 20, 20\], a batch of"),
        (lambda A: linalg.lanczos(linalg.Dense(A[None])), "lanczos: A is .* a batch of matrices"),
        (lambda A: linalg.logdet(A.half()), "logdet: A is torch.float16; it must be float32 or"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.eye(20))


# ---- memory and range


@pytest.mark.parametrize(
    "estimate", [linalg.xdiag, linalg.hutchpp, linalg.hutchinson_diagonal, linalg.logdet]
)
def test_an_operator_may_write_all_products_into_the_same_memory(estimate):
    A = positive()
    memory = torch.empty(60 * 100, dtype=torch.float64)

    def product(X: Tensor) -> Tensor:
        return memory[: X.numel()].view(X.shape).copy_(A @ X)

    found = estimate(linalg.LinearOperator(60, product, dtype=torch.float64))
    torch.testing.assert_close(found.value, estimate(A).value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_squares_of_entries_may_leave_the_range_of_float32(device, scale):
    A = positive(device=device)
    scaled = (scale * A).float()
    for estimate in (linalg.hutchinson_diagonal, linalg.xdiag):
        found, expected = estimate(scaled), estimate(A.float())
        for a, b in (
            (found.value, expected.value),
            (found.standard_error, expected.standard_error),
        ):
            torch.testing.assert_close(a.double() / scale, b.double(), rtol=1e-3, atol=1e-5)
    shift = 60 * torch.tensor(scale, dtype=torch.float64).log()
    found, expected = linalg.logdet(scaled), linalg.logdet(A.float())
    torch.testing.assert_close(found.value.cpu() - shift, expected.value.cpu(), rtol=1e-3, atol=0)
