"""Kronecker products, chunked products, fused multiply-add: values and memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrix_cases import (
    ALL_FLOATS,
    eps,
    randn,
    rounding,
    subnormal,
)
from reference import products as reference
from torch.profiler import ProfilerActivity, profile
from torchium import linalg

batches = st.sampled_from([((), ()), ((3,), (3,)), ((2, 1), (4,)), ((), (2, 3)), ((0,), (0,))])
sizes = st.integers(1, 9)


# --- kron, kron_matmul ---


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@given(batch=batches, m=sizes, n=sizes, p=sizes, q=sizes)
def test_kron_is_exact_up_to_one_rounding(dtype, batch, m, n, p, q):
    A, B = randn(*batch[0], m, n, dtype=dtype), randn(*batch[1], p, q, dtype=dtype, seed=1)
    torch.testing.assert_close(linalg.kron(A, B), reference.kron(A, B).to(dtype), rtol=0, atol=0)


def test_kron_is_that_of_torch():
    A, B = randn(3, 4), randn(5, 2, seed=1)
    assert torch.equal(linalg.kron(A, B), torch.kron(A, B))


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@given(batch=batches, m=sizes, n=sizes, p=sizes, q=sizes, k=st.integers(0, 5))
def test_kron_matmul(dtype, batch, m, n, p, q, k):
    A, B = randn(*batch[0], m, n, dtype=dtype), randn(*batch[1], p, q, dtype=dtype, seed=1)
    X = randn(*batch[1], n * q, k, dtype=dtype, seed=2)
    K = reference.kron(A, B)
    exact = K @ X.double()
    result = linalg.kron_matmul(A, B, X)
    assert result.dtype == dtype
    assert result.shape == exact.shape
    bound = (n + q + 2) * eps(dtype) * (K.abs() @ X.double().abs())
    bound += rounding(dtype) * exact.abs() + subnormal(dtype)
    assert ((result.double() - exact).abs() <= bound).all()


def test_kron_matmul_forms_no_kronecker_product(device):
    A, B = torch.ones(300, 300, device=device), torch.ones(200, 200, device=device)
    X = torch.ones(60000, 1, device=device)  # kron(A, B) would take 14.4 GB
    assert (linalg.kron_matmul(A, B, X) == 60000).all()


# --- chunked_matmul ---


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@given(
    batch=batches,
    m=st.integers(0, 40),
    k=st.integers(0, 40),
    n=st.integers(0, 40),
    transposed=st.booleans(),
    strided=st.booleans(),
    limit=st.sampled_from([None, 700, 3000, 20_000]),
)
def test_chunked_matmul(dtype, batch, m, k, n, transposed, strided, limit):
    A = randn(*batch[0], m, k, dtype=dtype)
    B = (
        randn(*batch[1], n, k, dtype=dtype, seed=1).mT
        if transposed
        else randn(*batch[1], k, n, dtype=dtype, seed=1)
    )
    if strided:
        A = torch.stack([A, A], -1).flatten(-2)[..., ::2]  # no stride is 1
    exact = A.double() @ B.double()
    result = linalg.chunked_matmul(A, B, max_workspace_bytes=limit)
    assert result.dtype == dtype
    assert result.shape == exact.shape
    bound = (k + 2) * eps(dtype) * (A.double().abs() @ B.double().abs())
    bound += rounding(dtype) * exact.abs() + subnormal(dtype)
    assert ((result.double() - exact).abs() <= bound).all()


def assert_keeps_to_its_workspace(A, B, limit):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = linalg.chunked_matmul(A, B, max_workspace_bytes=limit)
    allocated = sum(
        e.self_cpu_memory_usage for e in recorded.events() if e.self_cpu_memory_usage > 0
    )
    assert result.nbytes <= allocated <= result.nbytes + limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [10_000, 50_000, 1_000_000])
def test_chunked_matmul_keeps_to_its_workspace(dtype, limit):
    A, B = randn(3, 50, 100, dtype=dtype), randn(3, 100, 40, dtype=dtype, seed=1)
    assert_keeps_to_its_workspace(A, B, limit)


@given(
    m=st.integers(1, 300),
    k=st.integers(1, 20),
    n=st.integers(1, 300),
    spare=st.integers(5_000, 60_000),
)
def test_chunked_matmul_keeps_to_any_workspace(m, k, n, spare):
    A, B = randn(m, k, dtype=torch.float16), randn(k, n, dtype=torch.float16, seed=1)
    assert_keeps_to_its_workspace(A, B, 8 * k + 4 + spare)  # the minimum, and some more


def test_chunked_matmul_needs_no_workspace_for_dense_float32():
    A, B = randn(2, 1, 30, 40, dtype=torch.float32), randn(3, 20, 40, dtype=torch.float32).mT
    torch.testing.assert_close(linalg.chunked_matmul(A, B, max_workspace_bytes=0), A @ B)


@pytest.mark.cuda
def test_chunked_matmul_keeps_to_its_workspace_on_cuda():
    A = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
    B = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    linalg.chunked_matmul(A[:8], B)  # BLAS' own workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    C = linalg.chunked_matmul(A, B, max_workspace_bytes=1 << 20)
    assert torch.cuda.max_memory_allocated() - before <= C.nbytes + (1 << 20)
    exact = A.double() @ B.double()
    assert (C.double() - exact).abs().max() <= 0.01 * exact.abs().max()


def test_chunked_matmul_out_of_memory_says_what_to_do():
    A = torch.empty(1, 1).expand(2**25, 2**10)
    with pytest.raises(torch.OutOfMemoryError, match="max_workspace_bytes"):
        linalg.chunked_matmul(A, torch.empty(1, 1).expand(2**10, 2**25))


# --- fused_mul_add ---


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@pytest.mark.parametrize(
    "shapes", [((7,), (7,), (7,)), ((3, 1), (4,), ()), ((1000, 33),) * 3, ((0, 3),) * 3]
)
def test_fused_mul_add(dtype, shapes, device):
    a, b, c = (randn(*shape, dtype=dtype, seed=i).to(device) for i, shape in enumerate(shapes))
    result = linalg.fused_mul_add(a, b, c)
    exact = a.double() * b.double() + c.double()
    assert result.dtype == dtype
    assert result.shape == exact.shape
    bound = 2 * eps(dtype) * ((a.double() * b.double()).abs() + c.double().abs())
    assert (
        (result.double() - exact).abs() <= bound + rounding(dtype) * exact.abs() + subnormal(dtype)
    ).all()


def test_fused_mul_add_takes_unaligned_and_strided_operands(device):
    a, b, c = (randn(41, dtype=torch.float32, seed=i).to(device)[1:] for i in range(3))
    torch.testing.assert_close(linalg.fused_mul_add(a, b, c), a * b + c)
    torch.testing.assert_close(linalg.fused_mul_add(a[::2], b[::2], c[::2]), (a * b + c)[::2])


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float16, torch.bfloat16),
        (torch.float64, torch.float32, torch.float16),
    ],
)
def test_fused_mul_add_promotes_as_addcmul(dtypes):
    a, b, c = (randn(5, dtype=d, seed=i) for i, d in enumerate(dtypes))
    result = linalg.fused_mul_add(a, b, c)
    assert result.dtype == torch.addcmul(c, a, b).dtype
    assert torch.equal(result, torch.addcmul(c, a, b))
