"""Kronecker products, chunked products, symmetric positive definite systems, fused multiply-add."""

from __future__ import annotations

import math

import pytest
import torch
import torchium
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import products as reference
from torch import Tensor
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile
from torchium import linalg

ops = torch.ops.torchium
FLOATS = [torch.float32, torch.float64]
ALL_FLOATS = [*FLOATS, torch.bfloat16, torch.float16]
SPECTRA = ["spread", "clustered", "rank_deficient", "one_huge", "zero"]
SCALES = [1e-30, 1.0, 1e30]


def eps(dtype: torch.dtype) -> float:
    """Unit roundoff of the dtype that operands of `dtype` are computed in."""
    return torch.finfo(torch.float32 if dtype.itemsize == 2 else dtype).eps


def rounding(dtype: torch.dtype) -> float:
    """Of the result: zero when it is computed in its own dtype."""
    return torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0


def floor(n: int, dtype: torch.dtype) -> float:
    """The floor under eigenvalues, in units of the largest: docs of spd_inverse."""
    return eps(dtype) * (4 + 0.25 * math.sqrt(n))


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def spectrum(kind: str, n: int) -> Tensor:
    """Eigenvalues, the largest of them 1 (zero: all 0)."""
    match kind:
        case "spread":
            return (
                torch.logspace(-3, 0, n, dtype=torch.float64) if n > 1 else torch.ones(1).double()
            )
        case "clustered":
            values = torch.full((n,), 0.25, dtype=torch.float64)
        case "rank_deficient":
            values = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
            values[: (n + 1) // 2] = 0
        case "one_huge":
            values = torch.full((n,), 1e-20, dtype=torch.float64)
        case "zero":
            return torch.zeros(n, dtype=torch.float64)
    values[-1] = 1
    return values


def symmetric(
    kind: str, n: int, scale: float = 1.0, seed: int = 0, batch: tuple[int, ...] = ()
) -> Tensor:
    Q, _ = torch.linalg.qr(randn(*batch, n, n, seed=seed))
    A = scale * (Q * spectrum(kind, n)) @ Q.mT
    return (A + A.mT) / 2


def norm(x: Tensor) -> Tensor:
    """Frobenius norms, in float64 and without overflow."""
    x = x.double()
    largest = x.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
    return (x / largest).square().sum((-2, -1)).sqrt() * largest[..., 0, 0]


batches = st.sampled_from([((), ()), ((3,), (3,)), ((2, 1), (4,)), ((), (2, 3)), ((0,), (0,))])
sizes = st.integers(1, 9)


# --- kron, kron_matmul ---


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@settings(max_examples=25, deadline=None)
@given(batch=batches, m=sizes, n=sizes, p=sizes, q=sizes)
def test_kron_is_exact_up_to_one_rounding(dtype, batch, m, n, p, q):
    A, B = randn(*batch[0], m, n, dtype=dtype), randn(*batch[1], p, q, dtype=dtype, seed=1)
    torch.testing.assert_close(linalg.kron(A, B), reference.kron(A, B).to(dtype), rtol=0, atol=0)


def test_kron_is_that_of_torch():
    A, B = randn(3, 4), randn(5, 2, seed=1)
    assert torch.equal(linalg.kron(A, B), torch.kron(A, B))


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@settings(max_examples=25, deadline=None)
@given(batch=batches, m=sizes, n=sizes, p=sizes, q=sizes, k=st.integers(0, 5))
def test_kron_matmul(dtype, batch, m, n, p, q, k):
    A, B = randn(*batch[0], m, n, dtype=dtype), randn(*batch[1], p, q, dtype=dtype, seed=1)
    X = randn(*batch[1], n * q, k, dtype=dtype, seed=2)
    K = reference.kron(A, B)
    exact = K @ X.double()
    result = linalg.kron_matmul(A, B, X)
    assert result.dtype == dtype
    assert result.shape == exact.shape
    bound = (n + q + 2) * eps(dtype) * (K.abs() @ X.double().abs()) + rounding(dtype) * exact.abs()
    assert ((result.double() - exact).abs() <= bound).all()


def test_kron_matmul_forms_no_kronecker_product(device):
    A, B = torch.ones(300, 300, device=device), torch.ones(200, 200, device=device)
    X = torch.ones(60000, 1, device=device)  # kron(A, B) would take 14.4 GB
    assert (linalg.kron_matmul(A, B, X) == 60000).all()


# --- chunked_matmul ---


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@settings(max_examples=40, deadline=None)
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
    bound = (k + 2) * eps(dtype) * (A.double().abs() @ B.double().abs()) + rounding(
        dtype
    ) * exact.abs()
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [10_000, 50_000, 1_000_000])
def test_chunked_matmul_keeps_to_its_workspace(dtype, limit):
    A, B = randn(3, 50, 100, dtype=dtype), randn(3, 100, 40, dtype=dtype, seed=1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = linalg.chunked_matmul(A, B, max_workspace_bytes=limit)
    allocated = sum(
        e.self_cpu_memory_usage for e in recorded.events() if e.self_cpu_memory_usage > 0
    )
    assert result.nbytes <= allocated <= result.nbytes + limit


@given(
    m=st.integers(1, 300),
    k=st.integers(1, 20),
    n=st.integers(1, 300),
    spare=st.integers(5_000, 60_000),
)
@settings(max_examples=30, deadline=None)
def test_chunked_matmul_keeps_to_any_workspace(m, k, n, spare):
    A, B = randn(m, k, dtype=torch.float16), randn(k, n, dtype=torch.float16, seed=1)
    limit = 8 * k + 4 + spare  # the least there can be, and some more
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = linalg.chunked_matmul(A, B, max_workspace_bytes=limit)
    allocated = sum(
        e.self_cpu_memory_usage for e in recorded.events() if e.self_cpu_memory_usage > 0
    )
    assert result.nbytes <= allocated <= result.nbytes + limit


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


# --- spd_inverse, spd_solve, kron_solve ---


def check_residual(A: Tensor, X: Tensor, solution: Tensor, least: float) -> None:
    """A X = B up to backward error, where eigenvalues below `least` count as `least`."""
    A, X, solution = A.double(), X.double(), solution.double()
    n = A.shape[-1]
    unit = floor(n, torch.float32 if least > 1e-12 * norm(A).max() else torch.float64)
    residual = norm(A @ solution - X)
    largest = norm(A)
    bound = 8 * n * unit * (largest * norm(solution) + norm(X)) + 2 * least * norm(solution)
    assert (residual <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=60, deadline=None)
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
        return  # the answer may saturate at the largest number
    check_residual(A, torch.eye(n, dtype=dtype), inverse, least)
    check_residual(A, X, solution, least)


def allowed_error(lapack: Tensor, exact: Tensor, A: Tensor, dtype: torch.dtype) -> Tensor:
    """Four times LAPACK's own error in the same dtype, and the roundings of input and result."""
    n = A.shape[-1]
    # The reference is float64 as well: it is no better than backward stability makes it.
    own = floor(n, dtype) * torch.linalg.cond(A) if dtype == torch.float64 else n * eps(dtype)
    return 4 * norm(lapack - exact) + (4 * own + 4 * rounding(dtype)) * norm(exact)


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@pytest.mark.parametrize("damping", [0.0, 1e-3, 10.0])
@pytest.mark.parametrize("n", [1, 7, 64])
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
        torch.testing.assert_close(result[0], alone)
        assert result[[1, 3, 4]].isfinite().all()
        assert result[2].isnan().all()


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
@settings(max_examples=60, deadline=None)
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
    if least > tiny and largest < 1 / tiny:  # else the answer saturates, or vanishes
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
    # The eigenvalues are known to a few units of the largest: 1 / (d + damping) errs accordingly.
    condition = torch.linalg.cond(K)
    allowed = 4 * norm(lapack - exact) + 4 * (floor(9, dtype) * condition + rounding(dtype)) * norm(
        exact
    )
    solution = linalg.kron_solve(A, B, X, damping)
    assert solution.shape == (2, 3, 54, 4)
    assert solution.dtype == dtype
    assert (norm(solution - exact) <= allowed).all()


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
    assert ((result.double() - exact).abs() <= bound + rounding(dtype) * exact.abs()).all()


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


# --- derivatives, fake tensors, compilation ---

DIFFERENTIABLE = {
    "kron": [((3, 2), (2, 4)), ((2, 1, 3, 2), (3, 2, 2))],
    "kron_matmul": [((3, 2), (2, 4), (8, 3)), ((2, 1, 2, 2), (3, 2, 2), (4, 1))],
    "chunked_matmul": [
        ((3, 4), (4, 2)),
        ((2, 3, 4), (4, 2)),
        ((3, 4), (2, 4, 2)),
        ((2, 1, 3, 4), (3, 4, 2)),
    ],
    "fused_mul_add": [((3,), (3,), (3,)), ((3, 1), (4,), ()), ((2, 1), (1, 3), (2, 3))],
}
OTHERS = {
    "kron_solve": lambda *lead: (
        symmetric("spread", 2, batch=lead),
        symmetric("spread", 3, seed=1),
        randn(*lead, 6, 2),
        0.1,
    ),
    "spd_inverse": lambda *lead: (symmetric("spread", 3, batch=lead),),
    "spd_solve": lambda *lead: (symmetric("spread", 3, batch=lead), randn(3, 2)),
}
CASES = [(name, shapes) for name, cases in DIFFERENTIABLE.items() for shapes in cases]


@pytest.mark.parametrize(("name", "shapes"), CASES)
def test_derivatives(name, shapes):
    operands = [randn(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    function = getattr(ops, name)
    assert torch.autograd.gradcheck(function, operands)
    assert torch.autograd.gradgradcheck(function, operands)


def test_fused_mul_add_derivatives_have_the_dtypes_of_the_operands():
    a = randn(4, 1, dtype=torch.float16).requires_grad_()
    b = randn(5, dtype=torch.float32).requires_grad_()
    c = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    linalg.fused_mul_add(a, b, c).sum().backward()
    assert [x.grad.dtype for x in (a, b, c)] == [x.dtype for x in (a, b, c)]
    assert c.grad == 20


def test_chunked_matmul_derivative_keeps_to_the_workspace():
    A, B = (randn(40, 40, dtype=torch.bfloat16, seed=i).requires_grad_() for i in range(2))
    linalg.chunked_matmul(A, B, max_workspace_bytes=2000).sum().backward()
    torch.testing.assert_close(A.grad, B.sum(1).expand(40, 40), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("name", "shapes"), CASES)
def test_opcheck_differentiable(name, shapes, device):
    operands = tuple(randn(*s, seed=i).to(device).requires_grad_() for i, s in enumerate(shapes))
    opcheck(getattr(ops, name).default, operands)


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("name", OTHERS)
def test_opcheck_others(name, lead, device):
    arguments = tuple(x.to(device) if isinstance(x, Tensor) else x for x in OTHERS[name](*lead))
    opcheck(getattr(ops, name).default, arguments)


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *OTHERS])
def test_meta_tensors_have_the_shape_of_the_result(name):
    if name in OTHERS:
        arguments = OTHERS[name](2)
    else:
        arguments = tuple(randn(*s, seed=i) for i, s in enumerate(DIFFERENTIABLE[name][-1]))
    function = getattr(linalg, name)
    meta = function(*(x.to("meta") if isinstance(x, Tensor) else x for x in arguments))
    real = function(*arguments)
    assert meta.shape == real.shape
    assert meta.dtype == real.dtype
    assert meta.stride() == real.stride()


def test_compiles_into_one_graph():
    def function(A, B, X, c):
        Y = linalg.chunked_matmul(linalg.kron(A, B), X)
        Y = linalg.fused_mul_add(Y, linalg.kron_matmul(A, B, X), c)
        with torch.no_grad():
            Z = linalg.spd_solve(A, linalg.spd_inverse(A, damping=1.0), damping=0.5)
        return Y + linalg.kron_solve(Z, B, X, 0.1).detach().sum()

    arguments = symmetric("spread", 3), symmetric("spread", 2, seed=1), randn(6, 4), randn(4)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_autocast_does_not_reach_inside(device):
    A, B = (randn(30, 30, dtype=torch.float32, seed=i).to(device) for i in range(2))
    X = randn(900, 2, dtype=torch.float32).to(device)
    outside = linalg.kron_matmul(A, B, X), linalg.chunked_matmul(A, B)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = linalg.kron_matmul(A, B, X), linalg.chunked_matmul(A, B)
    for x, y in zip(outside, inside, strict=True):
        assert torch.equal(x, y)


# --- bad input ---


@pytest.mark.parametrize("name", OTHERS)
def test_no_derivative_is_said_with_the_remedy(name):
    arguments = list(OTHERS[name]())
    arguments[0].requires_grad_()
    function = getattr(linalg, name)
    with pytest.raises(
        RuntimeError, match=f"{name} has no derivative, but [AX] requires.*torch.no_grad"
    ):
        function(*arguments)
    with torch.no_grad():
        assert function(*arguments).isfinite().all()


I2, I3 = torch.eye(2), torch.eye(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linalg.kron(I2[0], I2), r"kron: A has shape \[2\].*two dimensions"),
        (lambda: linalg.kron(I2, I2.double()), r"kron: B has dtype Double"),
        (
            lambda: linalg.kron(I2.expand(2, 2, 2), I2.expand(3, 2, 2)),
            r"A \[2, 2, 2\] and B \[3, 2, 2\]",
        ),
        (lambda: linalg.kron(I2.int(), I2.int()), r"A has dtype Int"),
        (lambda: linalg.kron(I2.cfloat(), I2.cfloat()), r"A has dtype ComplexFloat"),
        (lambda: linalg.kron(I2.to_sparse(), I2), r"A has layout .*to_dense"),
        (lambda: linalg.kron(I2, I2.to("meta")), r"B is on meta"),
        (lambda: linalg.kron_matmul(I2, I3, I2), r"X has shape \[2, 2\].*\[\.\.\., 6, m\]"),
        (lambda: linalg.kron_solve(I2, I3, I2, 0.1), r"X has shape \[2, 2\].*\[\.\.\., 6, m\]"),
        (lambda: linalg.kron_solve(I2, torch.ones(2, 3), I2, 0.1), r"B has shape \[2, 3\]"),
        (lambda: linalg.kron_solve(I2, I2, torch.eye(4), -1.0), r"damping is -1"),
        (lambda: linalg.kron_solve(I2, I2, torch.eye(4), math.nan), r"damping is nan"),
        (lambda: linalg.chunked_matmul(I2, I3), r"A has shape \[2, 2\] and B \[3, 3\]"),
        (lambda: linalg.chunked_matmul(I2[0], I2), r"A has shape \[2\]"),
        (
            lambda: linalg.chunked_matmul(I2, I2, max_workspace_bytes=-1),
            r"max_workspace_bytes is -1",
        ),
        (
            lambda: linalg.chunked_matmul(I2.half(), I2.half(), max_workspace_bytes=19),
            r"is 19; .* needs 20",
        ),
        (lambda: linalg.spd_inverse(torch.ones(2, 3)), r"spd_inverse: A has shape \[2, 3\]"),
        (lambda: linalg.spd_inverse(I2, damping=math.inf), r"damping is inf"),
        (lambda: linalg.spd_inverse(I2, damping=1e300), r"damping is 1e\+300"),
        (lambda: linalg.spd_solve(I2, I3), r"spd_solve: X has shape \[3, 3\]"),
        (lambda: linalg.spd_solve(I2, I2.to_sparse()), r"X has layout"),
        (lambda: linalg.fused_mul_add(I2, I2, I2.int()), r"c has dtype Int"),
        (lambda: linalg.fused_mul_add(I2.cfloat(), I2, I2), r"a has dtype ComplexFloat"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_package_exports():
    assert torchium.linalg is linalg
    assert {"kron", "chunked_matmul", "spd_solve"} <= set(linalg.__all__)
