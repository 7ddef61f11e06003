"""Kronecker products, chunked products, fused multiply-add: values and memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from cuda_launches import launches_of
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
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
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


def test_chunked_matmul_takes_its_options_by_position():
    A = randn(30, 20, dtype=torch.float16)
    expected = linalg.chunked_matmul(A, A.T, max_workspace_bytes=5_000, precision="high")
    assert torch.equal(linalg.chunked_matmul(A, A.T, 5_000, "high"), expected)
    with pytest.raises(ValueError, match="precision is 'low'"):
        linalg.chunked_matmul(A, A.T, None, "low")


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


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@pytest.mark.parametrize("shapes", [((7,), (7,), (7,)), ((3, 1), (4,), ()), ((1000, 33),) * 3])
def test_fused_mul_add_writes_to_out(dtype, shapes, device):
    a, b, c = (randn(*shape, dtype=dtype, seed=i).to(device) for i, shape in enumerate(shapes))
    expected = linalg.fused_mul_add(a, b, c)
    out = torch.full_like(expected, torch.nan)
    assert linalg.fused_mul_add(a, b, c, out=out) is out
    assert torch.equal(out, expected)
    if a.shape == expected.shape:
        version = a._version
        linalg.fused_mul_add(a, b, c, out=a)
        assert torch.equal(a, expected)
        assert a._version > version


def test_an_out_that_does_not_fit_is_refused(device):
    a, b, c = (randn(3, dtype=torch.float32, seed=i).to(device) for i in range(3))
    with pytest.raises(ValueError, match=r"fused_mul_add: out is \[4\] of Float; it must be \[3\]"):
        linalg.fused_mul_add(a, b, c, out=torch.zeros(4, device=device))
    with pytest.raises(ValueError, match=r"out is \[3\] of Double; it must be \[3\] of Float"):
        linalg.fused_mul_add(a, b, c, out=torch.zeros(3, device=device, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="fused_mul_add with `out` has no derivative"):
        linalg.fused_mul_add(a.requires_grad_(), b, c, out=torch.zeros(3, device=device))
    with pytest.raises(ValueError, match="fused_mul_add: out is 3 "):
        linalg.fused_mul_add(a, b, c, out=3)


def mixed_list(device: torch.device | str, count: int, dtypes: list[torch.dtype]) -> list[Tensor]:
    """Shapes of one to some thousand entries, empty ones, unaligned and strided ones."""
    shapes = [(), (1,), (7,), (33, 5), (64, 64), (0, 3), (9000,), (4097,)]
    tensors = []
    for i in range(count):
        shape, dtype = shapes[i % len(shapes)], dtypes[i % len(dtypes)]
        x = randn(*shape, dtype=dtype, seed=i).to(device)
        if i % 5 == 1:
            x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(shape)  # not aligned
        if i % 7 == 3 and len(shape) == 2:
            x = x.mT.contiguous().mT  # not contiguous
        tensors.append(x)
    return tensors


def test_operands_that_do_not_fit_each_other_are_named():
    a, b, c = torch.ones(3), torch.ones(4), torch.ones(5)
    with pytest.raises(
        ValueError, match=r"fused_mul_add: the shapes of a \[3\] and b \[4\] do not"
    ):
        linalg.fused_mul_add(a, b, c)
    with pytest.raises(ValueError, match=r"fused_mul_add: b is on meta and a on cpu; move one"):
        linalg.fused_mul_add(a, a.to("meta"), a)
    with pytest.raises(ValueError, match=r"fused_mul_add: out is on meta and a on cpu; move one"):
        linalg.fused_mul_add(a, a, a, out=a.to("meta"))
    with pytest.raises(ValueError, match=r"chunked_matmul: B is on meta and A on cpu; move one"):
        linalg.chunked_matmul(torch.eye(3), torch.eye(3, device="meta"))


def test_an_out_that_shares_a_part_of_its_memory_is_refused(device):
    memory, x = torch.randn(20, device=device), torch.randn(10, device=device)
    before = memory.clone()
    for operands in ((memory[:10], x, x), (x, memory[:10], x), (x, x, memory[:10])):
        with pytest.raises(ValueError, match="fused_mul_add: out shares a part of its memory with"):
            linalg.fused_mul_add(*operands, out=memory[5:15])
    square = memory[:16].view(4, 4)
    with pytest.raises(ValueError, match=r"out shares a part of its memory with c; pass c\.clone"):
        linalg.fused_mul_add(square.clone(), square.clone(), square, out=square.mT)
    with pytest.raises(ValueError, match="out has entries that share memory"):
        linalg.fused_mul_add(x, x, x, out=memory[:1].expand(10))
    assert torch.equal(memory, before)


@pytest.mark.parametrize("count", [1, 40, 2000])
def test_fused_mul_add_of_lists(device, count):
    a, b, c = (
        mixed_list(device, 3 * count, ALL_FLOATS)[i * count : (i + 1) * count] for i in range(3)
    )
    a, b = (
        [
            y.view_as(z).to(z) if y.numel() == z.numel() else torch.full_like(z, 0.5)
            for y, z in zip(x, c, strict=True)
        ]
        for x in (a, b)
    )
    a[0] = a[0].reshape(-1)[:1].sum() if a[0].numel() else a[0]  # broadcasts
    expected = [linalg.fused_mul_add(*entry) for entry in zip(a, b, c, strict=True)]
    versions = [z._version for z in c]
    assert linalg.fused_mul_add_(a, b, c) is None
    for found, z, version in zip(c, expected, versions, strict=True):
        torch.testing.assert_close(found, z, rtol=0, atol=0)
        assert found.numel() == 0 or found._version > version


def test_lists_that_do_not_fit_change_nothing(device):
    def lists() -> tuple[list[Tensor], ...]:
        return tuple(
            [torch.ones(3, device=device), torch.ones(2, 2, device=device)] for _ in range(3)
        )

    def refuses(message: str, change, error: type[Exception] = ValueError) -> None:
        a, b, c = lists()
        change(a, b, c)
        with pytest.raises(error, match=message):
            linalg.fused_mul_add_(a, b, c)
        assert all(bool((z == 1).all()) for z in c)

    refuses("a, b and c have 1, 2 and 2 entries; they must be", lambda a, b, c: a.pop())
    refuses(
        r"a\[1\] is \[3\] of Float .* it must fit c\[1\], which is \[2, 2\]",
        lambda a, b, c: a.__setitem__(1, a[0]),
    )
    refuses(r"b\[1\] is \[2, 2\] of Double", lambda a, b, c: b.__setitem__(1, b[1].double()))
    refuses(r"c\[0\] has dtype Int", lambda a, b, c: c.__setitem__(0, c[0].int()))
    refuses("an entry is in c twice", lambda a, b, c: [x.__setitem__(1, x[0]) for x in (a, b, c)])
    row = torch.ones(1, 2, device=device)
    refuses(
        r"c\[1\] has entries that share memory", lambda a, b, c: c.__setitem__(1, row.expand(2, 2))
    )
    memory = torch.ones(5, device=device)
    refuses(
        r"c\[1\] shares a part of its memory with b\[1\]; pass b\[1\]\.clone",
        lambda a, b, c: [
            x.__setitem__(1, y) for x, y in ((a, a[0]), (b, memory[1:4]), (c, memory[:3]))
        ],
    )
    refuses("has no derivative", lambda a, b, c: a[0].requires_grad_(), RuntimeError)
    refuses(r"a\[0\] is 3 .*it must be a tensor", lambda a, b, c: a.__setitem__(0, 3))
    with pytest.raises(ValueError, match="a is of type Tensor; it must be a list or tuple"):
        linalg.fused_mul_add_(torch.ones(3), [torch.ones(3)], [torch.ones(3)])
    linalg.fused_mul_add_([], [], [])


def test_lists_are_not_kept():
    a, b, c = ([torch.ones(2)] for _ in range(3))
    linalg.fused_mul_add_(a, b, c)
    entry = weakref.ref(c.pop())
    assert entry() is None


def test_lists_below_a_mode_and_compiled():
    def result(x: Tensor) -> Tensor:
        y = x.clone()
        linalg.fused_mul_add_([x], [x], [y])
        return y

    x = torch.full((3,), 2.0)
    with FakeTensorMode() as mode:
        assert result(mode.from_tensor(x)).shape == (3,)
    compiled = torch.compile(result, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), torch.full((3,), 6.0))


@pytest.mark.cuda
def test_a_list_of_hundreds_takes_one_launch():
    a, b, c = ([torch.ones(100 + i, device="cuda") for i in range(500)] for _ in range(3))
    linalg.fused_mul_add_(a, b, c)
    assert launches_of(lambda: linalg.fused_mul_add_(a, b, c)) == 1
