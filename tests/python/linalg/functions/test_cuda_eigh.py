"""Eigenproblems by divide and conquer on a CUDA device, against float64."""

from __future__ import annotations

import pytest
import torch
from cuda_launches import kernels_of
from cuda_waits import no_waits
from reference.matrix_functions import from_spectrum
from torch import Tensor
from torchium.linalg import eigh, svd

pytestmark = pytest.mark.cuda

# The smallest and the largest of each size of a cluster, and such that need padding.
ORDERS = [65, 100, 128, 129, 250, 256, 257, 500, 512, 513, 777, 1000, 1024, 1025, 1153, 1168]
EPSILON = torch.finfo(torch.float32).eps


def tridiagonal(diagonal: Tensor, off_diagonal: Tensor) -> Tensor:
    return torch.diag(diagonal) + torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1)


def random(n: int) -> Tensor:
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return (A + A.T) / 2


def line(n: int, *values: float) -> Tensor:
    return torch.linspace(*values, n, dtype=torch.float64)


CASES = {
    "random": random,
    "definite": lambda n: from_spectrum(line(n, 0.01, 1)),
    "graded": lambda n: from_spectrum(10 ** line(n, 0, -12)),
    "rank deficient": lambda n: from_spectrum((line(n, -1, 2)).clamp_min(0)),
    "clusters": lambda n: from_spectrum((5 * line(n, 0, 1)).floor() + 1),
    "almost the identity": lambda n: torch.eye(n, dtype=torch.float64) + 1e-6 * random(n),
    "the identity": lambda n: torch.eye(n, dtype=torch.float64),
    "zero": lambda n: torch.zeros(n, n, dtype=torch.float64),
    "ones": lambda n: torch.ones(n, n, dtype=torch.float64),
    "diagonal": lambda n: torch.diag(random(n)[0]),
    "second differences": lambda n: tridiagonal(line(n, 2, 2), line(n - 1, -1, -1)),
    # Pairs of eigenvalues that agree in many more digits than float32 has (Wilkinson).
    "Wilkinson": lambda n: tridiagonal(line(n, -n / 2, n / 2).abs(), line(n - 1, 1, 1)),
    "blocks": lambda n: torch.block_diag(random(n // 2), 1e-5 * random(n - n // 2)),
    "huge": lambda n: 1e36 * random(n),
    "tiny": lambda n: 1e-36 * random(n),
}


def assert_solves(A: Tensor, values: Tensor, Q: Tensor) -> None:
    A, values, Q = (x.double() for x in (A, values, Q))
    n = A.shape[-1]
    exact = torch.linalg.eigvalsh(A)
    largest = exact.abs().amax(-1).clamp_min(torch.finfo(torch.float64).tiny)
    bound = (8 + n**0.5) * EPSILON
    assert (values.diff(dim=-1) >= 0).all()
    assert ((values - exact).abs().amax(-1) <= 10 * EPSILON * largest).all()
    rest = torch.linalg.matrix_norm(A @ Q - Q * values.unsqueeze(-2), 2)
    assert (rest <= bound * largest).all()
    identity = torch.eye(n, dtype=Q.dtype, device=Q.device)
    assert torch.linalg.matrix_norm(Q.mT @ Q - identity, 2).amax() <= 2 * bound


def kernels(n: int, dtype: torch.dtype) -> str:
    A = random(n).to("cuda", dtype)
    eigh(A)
    torch.cuda.synchronize()
    return " ".join(kernels_of(lambda: eigh(A)))


@pytest.mark.parametrize("n", ORDERS)
@pytest.mark.parametrize("name", list(CASES))
def test_eigenvalues_and_vectors(name: str, n: int) -> None:
    A = CASES[name](n).float().cuda()
    values, Q = eigh(A)
    assert_solves(A, values, Q)


@pytest.mark.parametrize("n", [96, 300, 1024])
def test_batches_of_all_cases(n: int) -> None:
    A = torch.stack([make(n) for make in CASES.values()]).float().cuda()
    values, Q = eigh(A)
    assert_solves(A, values, Q)


def test_more_matrices_than_one_launch_takes() -> None:
    A = from_spectrum(line(65, 0.1, 1)).float().cuda() * torch.arange(1, 8301).cuda()[:, None, None]
    values, Q = eigh(A)
    for part in (slice(0, 20), slice(3226, 3246), slice(8280, 8300)):
        assert_solves(A[part], values[part], Q[part])


@pytest.mark.parametrize(
    ("n", "dtype", "is_ours"),
    [
        (64, torch.float32, False),
        (65, torch.float32, True),
        (1168, torch.float32, True),
        (1169, torch.float32, False),
        (256, torch.float64, False),
    ],
)
def test_the_kernel_runs(n: int, dtype: torch.dtype, is_ours: bool) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    assert ("tridiagonalise_kernel" in kernels(n, dtype)) == is_ours


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_is_nan_alone(value: float) -> None:
    A = random(200).float().expand(3, 200, 200).clone().cuda()
    A[1, 7, 150] = A[1, 150, 7] = value
    values, Q = eigh(A)
    assert values[1].isnan().all()
    assert Q[1].isnan().all()
    assert_solves(A[::2], values[::2], Q[::2])


def test_no_waits_and_graphs() -> None:
    A = random(300).float().cuda()
    expected = eigh(A)
    with no_waits():
        eigh(A)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = eigh(A)
    A.copy_(2 * A)
    graph.replay()
    torch.testing.assert_close(captured[0], 2 * expected[0], rtol=0, atol=0)
    torch.testing.assert_close(captured[1], expected[1], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(300, 300), (1024, 700), (3, 129, 512)])
def test_singular_values(shape: tuple[int, ...]) -> None:
    A = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).cuda()
    U, S, Vh = (x.double() for x in svd(A))
    exact = torch.linalg.svdvals(A.double())
    largest = exact[..., :1]
    assert ((S - exact).abs() <= 10 * EPSILON * largest).all()
    rest = torch.linalg.matrix_norm((U * S.unsqueeze(-2)) @ Vh - A.double(), 2)
    assert (rest <= (8 + shape[-1] ** 0.5) * EPSILON * largest[..., 0]).all()
