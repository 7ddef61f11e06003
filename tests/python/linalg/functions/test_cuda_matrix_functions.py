"""Matrix functions on a CUDA device: no host waits, CUDA graphs, streams, hostile inputs."""

from __future__ import annotations

import functools
import multiprocessing

import matrix_cases
import pytest
import torch
from cuda_waits import no_waits
from matrix_cases import Function
from reference.matrix_functions import damped_power, from_spectrum, newton_bound, relative_error
from torch import Tensor
from torchium.linalg import matrix_inverse_root

pytestmark = pytest.mark.cuda

ORDERS = [1, 2, 16, 33, 100, 200]  # of every kernel
FUNCTIONS: dict[str, Function] = {
    **matrix_cases.FUNCTIONS,
    "third root by newton": lambda A: matrix_inverse_root(A, 3, eps=1e-3, method="newton"),
    "root and info": lambda A: matrix_inverse_root(
        A, 2, eps=1e-3, method="newton", return_info=True
    ),
    "roots of a list": lambda A: tuple(
        matrix_inverse_root([A, A[0], A.double(), 2 * A[1:]], 4, eps=1e-3, method="newton")
    ),
}


# cuSOLVER launches more kernels than the queue of a sleeping device holds.
FEW_LAUNCHES = ["root by newton", "third root by newton", "root and info"]


@pytest.fixture(params=list(FUNCTIONS))
def function(request: pytest.FixtureRequest) -> Function:
    return FUNCTIONS[request.param]


SPECTRA = {
    "log_uniform": lambda n: torch.logspace(0, -3, n, dtype=torch.float64),
    "steep": lambda n: torch.logspace(0, -9, n, dtype=torch.float64),
    "identity": lambda n: torch.ones(n, dtype=torch.float64),
    "rank_one": lambda n: (torch.arange(n) == 0).double(),
    "rank_deficient": lambda n: (torch.arange(n) <= n // 3).double(),
    "zero": lambda n: torch.zeros(n, dtype=torch.float64),
}
SCALES = [1e-42, 1e-30, 1.0, 1e30, 1e37]


@functools.cache
def hostile(n: int) -> Tensor:
    """Every spectrum at every scale in one batch, with random and with unit eigenvectors."""
    values = torch.stack([make(n) * scale for make in SPECTRA.values() for scale in SCALES])
    return torch.cat([from_spectrum(values), torch.diag_embed(values)]).float()


def stack(n: int, dtype: torch.dtype = torch.float32, seed: int = 0, count: int = 3) -> Tensor:
    values = torch.logspace(0, -4, n, dtype=torch.float64).expand(count, n)
    return from_spectrum(values, seed).to("cuda", dtype)


def tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, tuple)
    return [t for part in result for t in tensors(part)]


def assert_equal(actual: object, expected: object) -> None:
    for a, e in zip(tensors(actual), tensors(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", ORDERS)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_nothing_waits_for_the_device(name: str, n: int, dtype: torch.dtype) -> None:
    A = stack(n, dtype)
    function = FUNCTIONS[name]
    expected = function(A)
    with no_waits() as asleep:
        result = function(A)
    assert name not in FEW_LAUNCHES or not asleep.query()
    assert_equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", ORDERS)
def test_captured_calls_follow_their_input(function: Function, n: int, dtype: torch.dtype) -> None:
    A = stack(n, dtype)
    function(A)  # loads libraries and computes schedules
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        captured = function(A)
    for seed, scale in ((1, 1.0), (2, 1e-3), (3, 1e3)):
        A.copy_(stack(n, dtype, seed) * scale)
        if seed == 2:
            A[1].fill_(torch.nan)
        graph.replay()
        assert_equal(captured, function(A))


@pytest.mark.parametrize("n", ORDERS)
def test_every_stream_gives_the_same_bits(function: Function, n: int) -> None:
    A = stack(n)
    expected = function(A)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = function(A)
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(result, expected)


@pytest.mark.parametrize("method", ["eigh", "newton"])
@pytest.mark.parametrize("root", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("n", ORDERS)
def test_hostile_spectra(n: int, root: int, method: str) -> None:
    A = hostile(n).cuda()
    reference = A.double().cpu()
    for relative_eps in (0.0, 1e-6, 1e-2):
        X, info = matrix_inverse_root(
            A, root, relative_eps=relative_eps, method=method, return_info=True
        )
        assert X.isfinite().all()
        assert info.residual.isfinite().all()
        assert (info.floor > 0).all()
        assert torch.equal(X, X.mT)
        floor = info.floor.double().cpu()
        lowest, highest = torch.linalg.eigvalsh(reference)[:, [0, -1]].unbind(-1)
        by_newton = (info.iterations > 0).cpu()
        s = torch.where(by_newton, newton_bound(reference), highest.clamp(min=0))
        expected = damped_power(reference, -1 / root, relative_eps=relative_eps, s=s, floor=floor)
        damped = (lowest + relative_eps * s).clamp(min=0)
        well_above = damped > 4 * floor
        unit = torch.finfo(torch.float32).eps
        error = relative_error(X, expected)
        condition = s / torch.maximum(damped, floor)
        last_step = 1e-4 if method == "newton" else 0.0  # largest for multiples of the identity
        assert (error[well_above] <= 300 * unit * condition[well_above] + last_step).all()
        factor = 128 if root == 1 and method == "newton" else 64  # 98 by the last step
        bound = factor * floor.pow(-1 / root)
        assert (torch.linalg.matrix_norm(X.double().cpu(), 2) <= bound).all()


@pytest.mark.parametrize("n", ORDERS)
def test_a_failed_matrix_is_flagged_and_alone(n: int) -> None:
    A = stack(n, count=4)
    clean, clean_info = matrix_inverse_root(A, 4, eps=1e-3, method="newton", return_info=True)
    A[1] = from_spectrum(torch.linspace(-1, 0.5, n))
    A[2, -1, 0] = torch.nan
    X, info = matrix_inverse_root(A, 4, eps=1e-3, method="newton", return_info=True)
    assert X[1].isfinite().all()
    assert info.residual[1] > 1e-2
    assert info.iterations[1] == 0
    assert X[2].isnan().all()
    assert info.residual[2].isnan()
    for i in (0, 3):
        assert_equal((X[i], *(t[i] for t in info)), (clean[i], *(t[i] for t in clean_info)))


@pytest.mark.parametrize("n", [16, 100, 200, 330])
def test_many_matrices_of_different_scale(n: int) -> None:
    """Each has its own number of iterations."""
    count = 60
    spectrum = torch.logspace(0, -4, n, dtype=torch.float64)
    values = torch.logspace(0, -6, count, dtype=torch.float64)[:, None] * spectrum
    A = from_spectrum(values).to("cuda", torch.float32)
    X, info = matrix_inverse_root(A, 4, eps=1e-5, method="newton", return_info=True)
    assert len(info.iterations.unique()) >= 4
    expected = damped_power(A.cpu(), -0.25, eps=1e-5)
    condition = (values.amax(-1) + 1e-5) / (values.amin(-1) + 1e-5)
    error = relative_error(X, expected)
    assert (error <= 100 * torch.finfo(torch.float32).eps * condition.clamp(min=8)).all()


@pytest.mark.parametrize("n", [2500, 4096, 8192])
def test_large_orders(n: int) -> None:
    """Eigenvectors are those of a reflection, so the root is known without a solver."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    v = torch.randn(n, 1, generator=generator, device="cuda", dtype=torch.float64)
    v /= v.norm()

    def reflected(values: Tensor) -> Tensor:
        """Q D Q, Q = I - 2 v v^T."""
        image = values.unsqueeze(-1) * v
        product = torch.diag(values) - 2 * image @ v.mT
        product -= 2 * v @ image.mT
        return product + 4 * (v.mT @ image) * v @ v.mT

    values = torch.logspace(0, -2, n, device="cuda", dtype=torch.float64)
    A = reflected(values).float()
    X = matrix_inverse_root(A, 4, method="newton")
    expected = reflected(values**-0.25)
    assert (X - expected).norm() < 1e-4 * expected.norm()


def roots_beside_copies() -> None:
    """Batches of odd size, whose last cluster has a tile for one of its two blocks."""
    batches = []
    for count, n in ((15, 768), (7, 1024), (33, 384), (5, 640), (3, 896)):
        lowest = torch.linspace(-0.5, -6.5, count, dtype=torch.float64).view(-1, 1)
        exponents = lowest * torch.linspace(0, 1, n, dtype=torch.float64)
        batches.append(from_spectrum(10**exponents).to("cuda", torch.float32))
    beside = torch.cuda.Stream()
    source = torch.zeros(1 << 26, device="cuda")
    target = torch.zeros_like(source)
    for _ in range(200):
        for A in batches:
            for _ in range(4):
                with torch.cuda.stream(beside):
                    for _ in range(3):
                        target.copy_(source)
                matrix_inverse_root(A, 4)
    torch.cuda.synchronize()


def test_roots_end_beside_other_kernels() -> None:
    """In a process of its own: a warp that missed a barrier waited forever, mostly within seconds."""
    process = multiprocessing.get_context("spawn").Process(target=roots_beside_copies)
    process.start()
    process.join(timeout=120)
    if process.is_alive():
        process.kill()
    process.join()
    assert process.exitcode == 0
