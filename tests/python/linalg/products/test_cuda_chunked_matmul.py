"""Chunked products on a CUDA device: precision, workspace, and operands in host memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from matrix_cases import eps, rounding
from torch import Tensor
from torchium import linalg

pytestmark = pytest.mark.cuda

MIB = 1 << 20


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def relative_error(result: Tensor, A: Tensor, B: Tensor) -> float:
    """The largest error of an element, relative to |A| |B|, the scale of float32's own."""
    A, B = A.cuda().double(), B.cuda().double()
    return (((result.cuda().double() - A @ B).abs()) / (A.abs() @ B.abs())).max().item()


def float32_error(A: Tensor, B: Tensor) -> float:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return relative_error(A.cuda() @ B.cuda(), A, B)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# --- precision ---


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1024, 1024, 1024), (1001, 1303, 1110), (260, 8192, 3000), (2048, 300, 2051)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_highest_has_the_error_of_float32(m, k, n, transposed):
    A = randn(m, k)
    B = randn(n, k, seed=1).mT if transposed else randn(k, n, seed=1)
    result = linalg.chunked_matmul(A, B, precision="highest")
    assert relative_error(result, A, B) <= 2 * max(float32_error(A, B), eps(torch.float32))


def test_highest_is_relative_to_rows_and_columns():
    """Their magnitudes reach from 1e-15 to 1e15; one scale for all would lose the small ones."""
    A = randn(1024, 1024) * torch.logspace(-15, 15, 1024, device="cuda").unsqueeze(1)
    B = randn(1024, 1024, seed=1) * torch.logspace(-15, 15, 1024, device="cuda")
    A[7] = 0
    result = linalg.chunked_matmul(A, B, precision="highest")
    assert (result[7] == 0).all()
    A, B, result = torch.cat([A[:7], A[8:]]), B, torch.cat([result[:7], result[8:]])
    assert relative_error(result, A, B) <= 2 * float32_error(A, B)


def test_values_that_are_not_finite_stay_in_their_rows_and_columns():
    A, B = randn(1024, 1024), randn(1024, 1024, seed=1)
    expected = linalg.chunked_matmul(A, B)
    A[3, 5], A[4, 6], B[8, 9] = torch.nan, torch.inf, -torch.inf
    result = linalg.chunked_matmul(A, B)
    affected = torch.zeros(1024, 1024, dtype=torch.bool, device="cuda")
    affected[3], affected[4], affected[:, 9] = True, True, True
    assert not result[affected].isfinite().any()
    assert torch.equal(result[~affected], expected[~affected])


def test_high_is_tf32_whatever_torch_is_set_to():
    A, B = randn(1024, 1024), randn(1024, 1024, seed=1)
    error = relative_error(linalg.chunked_matmul(A, B, precision="high"), A, B)
    assert 10 * float32_error(A, B) < error < 2**-10
    strided = torch.stack([A, A], -1).flatten(-2)[:, ::2]
    torch.testing.assert_close(
        linalg.chunked_matmul(strided, B.mT.contiguous().mT, precision="high"),
        A @ B,
        rtol=0,
        atol=0.2,
    )


# --- workspace ---


def requested_bytes(when: str) -> int:
    """Without what the allocator adds, up to 1 MiB to a tensor."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


@pytest.mark.parametrize("limit", [2 * MIB, 9 * MIB, 20 * MIB, 40 * MIB, 64 * MIB])
@pytest.mark.parametrize(("m", "k", "n"), [(2048, 1024, 2048), (1500, 1111, 2001)])
def test_float32_keeps_to_its_workspace(limit, m, k, n):
    A, B = randn(m, k), randn(k, n, seed=1)
    linalg.chunked_matmul(A, B, max_workspace_bytes=0)  # BLAS' own workspace
    before = requested_bytes("current")
    torch.cuda.reset_peak_memory_stats()
    C = linalg.chunked_matmul(A, B, max_workspace_bytes=limit)
    assert requested_bytes("peak") - before <= C.nbytes + limit
    assert relative_error(C, A, B) <= 2 * max(float32_error(A, B), eps(torch.float32))


# --- operands in host memory ---

PLACES = ["pinned", "cuda", "pageable"]


def placed(x: Tensor, place: str) -> Tensor:
    return x if place == "cuda" else x.cpu() if place == "pageable" else x.cpu().pin_memory()


def assert_product(C: Tensor, A: Tensor, B: Tensor) -> None:
    dtype = A.dtype
    A, B = A.cuda().double(), B.cuda().double()
    exact = A @ B
    bound = (4 + A.shape[-1] ** 0.5) * eps(dtype) * (A.abs() @ B.abs()) + rounding(
        dtype
    ) * exact.abs()
    assert ((C.cuda().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("place_A", "place_B"),
    [both for both in itertools.product(PLACES, PLACES) if both != ("pageable", "pageable")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [MIB // 2, 3 * MIB, None])
def test_operands_in_host_memory(place_A, place_B, dtype, limit):
    A = placed(randn(700, 310, dtype=dtype), place_A)
    B = placed(randn(310, 530, dtype=dtype, seed=1), place_B)
    C = linalg.chunked_matmul(A, B, max_workspace_bytes=limit)
    assert C.is_cuda == ("cuda" in (place_A, place_B))
    assert C.is_cuda or C.is_pinned()
    assert C.dtype == dtype
    assert_product(C, A, B)


@pytest.mark.parametrize("limit", [10 * MIB, 30 * MIB, 100 * MIB, 300 * MIB])
@pytest.mark.parametrize(
    ("m", "k", "n"), [(9000, 1024, 1500), (1500, 1024, 9000), (3000, 2000, 3001)]
)
def test_streams_keep_to_their_workspace(limit, m, k, n):
    A, B = randn(m, k).cpu().pin_memory(), randn(k, n, seed=1).cpu().pin_memory()
    linalg.chunked_matmul(A, B, max_workspace_bytes=4 * MIB)  # BLAS' own workspace
    before = requested_bytes("current")
    torch.cuda.reset_peak_memory_stats()
    C = linalg.chunked_matmul(A, B, max_workspace_bytes=limit)
    assert requested_bytes("peak") - before <= limit
    assert_product(C, A, B)


@pytest.mark.parametrize("transposed", [(True, False), (False, True), (True, True)])
def test_transposed_and_strided_operands_in_host_memory(transposed):
    A, B = randn(600, 400).cpu().pin_memory(), randn(400, 500, seed=1).cpu().pin_memory()
    left = A.mT.contiguous().pin_memory().mT if transposed[0] else A
    right = B.mT.contiguous().pin_memory().mT if transposed[1] else B
    for limit in (MIB, None):
        assert_product(linalg.chunked_matmul(left, right, max_workspace_bytes=limit), A, B)
    strided = torch.stack([A, A], -1).pin_memory().flatten(-2)[:, ::2]
    assert_product(linalg.chunked_matmul(strided, right), A, B)


def test_batches_in_host_memory():
    A, B = randn(3, 1, 40, 50).cpu().pin_memory(), randn(2, 50, 60, seed=1).cpu().pin_memory()
    C = linalg.chunked_matmul(A, B)
    assert C.shape == (3, 2, 40, 60)
    assert_product(C, A, B)
    assert_product(linalg.chunked_matmul(A, B[0], max_workspace_bytes=MIB // 8), A, B[0])


def test_host_memory_may_change_after_the_call():
    A, B = randn(4096, 2048).cpu().pin_memory(), randn(2048, 4096, seed=1)
    expected = A.clone()
    C = linalg.chunked_matmul(A, B)
    A.zero_()
    assert_product(C, expected, B)


def test_a_result_that_exceeds_the_device_is_in_pinned_host_memory():
    A, B = randn(16384, 64), randn(64, 16384, seed=1)  # 1 GiB
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 900 * MIB) / total)
    try:
        C = linalg.chunked_matmul(A, B)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert C.is_pinned()
    rows = slice(0, 16384, 1000)
    assert_product(C[rows], A[rows], B)


def test_gradients_are_where_the_operands_are():
    A = randn(30, 40).cpu().pin_memory().requires_grad_()
    B = randn(40, 20, seed=1).requires_grad_()
    C = linalg.chunked_matmul(A, B)
    C.square().sum().backward()
    assert not A.grad.is_cuda
    assert B.grad.is_cuda
    G = 2 * C.detach()
    torch.testing.assert_close(A.grad, (G @ B.detach().mT).cpu())
    torch.testing.assert_close(B.grad, A.detach().cuda().mT @ G)
    both = [x.detach().cpu().pin_memory().requires_grad_() for x in (A, B)]
    linalg.chunked_matmul(*both).square().sum().backward()
    torch.testing.assert_close(both[0].grad, A.grad)
    torch.testing.assert_close(both[1].grad, B.grad.cpu())


def test_other_streams_wait_for_nothing_and_get_the_product():
    side = torch.cuda.Stream()
    A, B = randn(2000, 1000).cpu().pin_memory(), randn(1000, 1000, seed=1)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(3):
            C = linalg.chunked_matmul(A, B, max_workspace_bytes=8 * MIB)
    side.synchronize()
    assert_product(C, A, B)


def test_a_capture_is_refused():
    A, B = randn(64, 64).cpu().pin_memory(), randn(64, 64)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(graph):
        linalg.chunked_matmul(A, B)


def test_too_small_a_workspace_says_what_it_needs():
    A = randn(64, 64).cpu().pin_memory()
    with pytest.raises(ValueError, match=r"max_workspace_bytes is 100; one element .* needs"):
        linalg.chunked_matmul(A, A, max_workspace_bytes=100)
