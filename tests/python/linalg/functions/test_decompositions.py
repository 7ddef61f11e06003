"""cholesky, spd_logdet, orthogonalize, polar and svd, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_waits import no_waits
from matrix_cases import ALL_FLOATS, FLOATS, eps, floor, norm, randn, rounding, symmetric
from reference import decompositions
from reference import products as reference
from torch import Tensor
from torchium import linalg


def with_lowest(value: float, n: int = 6) -> Tensor:
    """Eigenvalues from `value` to 1."""
    Q, _ = torch.linalg.qr(randn(n, n, seed=3))
    values = torch.linspace(0.1, 1, n, dtype=torch.float64)
    values[0] = value
    A = (Q * values) @ Q.mT
    return (A + A.mT) / 2


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize("n", [1, 7, 64])
def test_cholesky(dtype, damping, n, device):
    A = symmetric("spread", n, batch=(2, 3)).to(dtype)
    A[..., 0, n - 1] *= 1 + 4 * torch.finfo(dtype).eps  # not quite symmetric
    exact = torch.linalg.cholesky(reference.damped(A, damping + (dtype.itemsize == 2) * 0.1))
    L, jitter = linalg.cholesky(A.to(device), damping=damping + (dtype.itemsize == 2) * 0.1)
    assert L.dtype == dtype
    assert L.shape == A.shape
    assert jitter.shape == (2, 3)
    assert bool((jitter == 0).all())
    assert torch.equal(L, L.tril())
    bound = (1e4 * floor(n, dtype) + 4 * rounding(dtype)) * norm(exact)
    assert (norm(L.double().cpu() - exact) <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_jitter_is_added_where_it_is_needed_and_reported(dtype, scale, device):
    noise = floor(6, dtype)
    lowest = [0.1, -0.3 * noise, -20 * noise, -0.1]
    A = (scale * torch.stack([with_lowest(x) for x in lowest])).to(device, dtype)
    A = torch.cat([A, torch.zeros_like(A[:1]), torch.full_like(A[:1], torch.nan)])
    L, jitter = linalg.cholesky(A)
    largest = A.abs().amax((-2, -1)).double()
    units = (jitter / (largest * noise)).tolist()
    assert units[0] == 0
    assert units[1:3] == pytest.approx([1, 100], rel=1e-6)
    assert jitter[3:].isnan().tolist() == [True, False, True]
    assert float(jitter[4]) == pytest.approx(torch.finfo(dtype).tiny)
    assert L[[3, 5]].isnan().all()
    good = [0, 1, 2, 4]
    factors = L[good].double() / scale**0.5
    target = A[good].double() / scale + torch.diag_embed(
        (jitter[good] / scale).unsqueeze(-1).expand(-1, 6)
    )
    assert (norm(factors @ factors.mT - target) <= 10 * noise).all()


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_spd_logdet(dtype, scale, device):
    if dtype == torch.float16 and scale != 1:
        pytest.skip("beyond the range of float16")
    n = 40
    A = (scale * symmetric("spread", n, batch=(3,))).to(dtype)
    damping = 0.1 * scale
    expected = torch.linalg.slogdet(reference.damped(A, damping)).logabsdet
    found = linalg.spd_logdet(A.to(device), damping=damping)
    assert found.dtype == (torch.float32 if dtype.itemsize == 2 else dtype)
    bound = 100 * n * eps(dtype) + eps(dtype) * expected.abs()
    assert ((found.double().cpu() - expected).abs() <= bound).all()
    assert linalg.spd_logdet(-A.to(device)).isnan().all()


def test_cholesky_of_nothing_and_of_what_does_not_fit(device):
    L, jitter = linalg.cholesky(torch.zeros(2, 0, 0, device=device))
    assert L.shape == (2, 0, 0)
    assert jitter.tolist() == [0, 0]
    assert linalg.spd_logdet(torch.zeros(2, 0, 0, device=device)).tolist() == [0, 0]
    for name, function in (("cholesky", linalg.cholesky), ("spd_logdet", linalg.spd_logdet)):
        with pytest.raises(ValueError, match=rf"{name}: A has shape \[2, 3\]; it must be"):
            function(torch.ones(2, 3))
        with pytest.raises(ValueError, match=rf"{name}: damping is -1"):
            function(torch.eye(2), damping=-1.0)
        with pytest.raises(ValueError, match=rf"{name}: A is 3 "):
            function(3)
        with pytest.raises(RuntimeError, match=rf"{name} has no derivative, but A requires grad"):
            function(torch.eye(2).requires_grad_())


@pytest.mark.cuda
def test_cholesky_does_not_wait():
    A = torch.stack([symmetric("spread", 100), -symmetric("spread", 100)]).float().cuda()
    expected = linalg.cholesky(A)
    with no_waits():
        found = linalg.cholesky(A)
        linalg.spd_logdet(A)
    torch.testing.assert_close(found.L, expected.L, rtol=0, atol=0, equal_nan=True)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 2 else dtype


@pytest.mark.parametrize("dtype", ALL_FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (3, 7), (2, 3, 40, 40), (200, 130)])
def test_polar_factors(dtype, shape, device):
    A = randn(*shape, dtype=dtype).to(device)
    U, H = linalg.polar(A)
    assert U.dtype == H.dtype == dtype
    assert torch.equal(H, H.mT)
    assert torch.equal(U, linalg.orthogonalize(A))
    exact = decompositions.polar(A.double().cpu())
    n = min(shape[-2:])
    unit = 10 * n * (floor(n, computed_in(dtype)) + rounding(dtype))
    wide = U.mT.double() if shape[-1] > shape[-2] else U.double()
    identity = torch.eye(n, dtype=torch.float64, device=device)
    assert (norm(wide.mT @ wide - identity) <= unit).all()
    largest = torch.linalg.matrix_norm(exact.H, 2)
    rest = torch.linalg.matrix_norm(U.double() @ H.double() - A.double(), 2).cpu()
    assert (rest <= unit * largest).all()
    assert (norm(H.double().cpu() - exact.H) <= math.sqrt(n) * unit * largest).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1e-37, 1.0, 1e37])
def test_small_singular_values_become_one_above_rcond(dtype, scale, device):
    n = 40
    left, right = (torch.linalg.qr(randn(n, n, seed=i)).Q for i in range(2))
    A = ((left * torch.logspace(0, -4, n, dtype=torch.float64)) @ right).to(device)
    S = torch.linalg.svdvals(linalg.orthogonalize((scale * A).to(dtype)).double())
    assert (S - 1).abs().max() <= 1e-5
    coarse = torch.linalg.svdvals(linalg.orthogonalize((scale * A).to(dtype), rcond=0.1).double())
    assert coarse.max() <= 1 + 1e-5
    assert (coarse[:10] - 1).abs().max() <= 1e-5  # those above 0.1


def test_polar_of_singular_and_non_finite_matrices(device):
    x = torch.ones(6, device=device)
    A = torch.stack(
        [torch.outer(x, x), torch.zeros(6, 6, device=device), torch.eye(6, device=device)]
    )
    A = torch.cat([A, torch.full_like(A[:1], torch.nan)])
    U, H = linalg.polar(A, rcond=1e-3)  # rounding errors of zeros stay below that
    assert U[3].isnan().all()
    assert H[3].isnan().all()
    torch.testing.assert_close(U[0], A[0] / 6, rtol=0, atol=2e-3)
    assert bool((U[1] == 0).all())
    torch.testing.assert_close(U[2], A[2], rtol=0, atol=1e-6)
    torch.testing.assert_close(H[:3], A[:3], rtol=0, atol=1e-5)
    assert linalg.orthogonalize(torch.zeros(2, 0, 3, device=device)).shape == (2, 0, 3)


@pytest.mark.parametrize("name", ["orthogonalize", "polar"])
def test_polar_refuses_what_does_not_fit(name):
    function = getattr(linalg, name)
    for rcond in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=rf"{name}: rcond is .*; it must be above 0"):
            function(torch.eye(3), rcond=rcond)
    with pytest.raises(ValueError, match=rf"{name}: A has shape \[3\]"):
        function(torch.ones(3))
    with pytest.raises(ValueError, match=rf"{name}: A is 3 "):
        function(3)


def matrix_of(kind: str, m: int, n: int) -> Tensor:
    """A matrix whose smallest singular values are of the order of one, tiny, equal or zero."""
    k = min(m, n)
    spectrum = {
        "random": torch.linspace(1, 3, k),
        "decaying": torch.logspace(0, -12, k),
        "equal": torch.ones(k),
        "rank_deficient": torch.cat([torch.ones(k // 2), torch.zeros(k - k // 2)]),
        "zero": torch.zeros(k),
    }[kind].double()
    left, right = (torch.linalg.qr(randn(x, x, seed=i)).Q for i, x in enumerate((m, n)))
    return (left[:, :k] * spectrum) @ right[:, :k].mT


@pytest.mark.parametrize("kind", ["random", "decaying", "equal", "rank_deficient", "zero"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", ALL_FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (30, 30), (60, 20), (20, 60), (200, 150)])
def test_svd(shape, dtype, scale, kind, device):
    if dtype == torch.float16 and scale != 1:
        pytest.skip("beyond the range of float16")
    k = min(shape)
    A = torch.stack([scale * matrix_of(kind, *shape), scale * randn(*shape)]).to(device, dtype)
    U, S, Vh = linalg.svd(A)
    assert (U.dtype, S.dtype, Vh.dtype) == (dtype,) * 3
    assert U.shape == (2, shape[0], k)
    assert S.shape == (2, k)
    assert Vh.shape == (2, k, shape[1])
    assert (S >= 0).all()
    assert (S.diff() <= 0).all()
    identity = torch.eye(k, dtype=torch.float64, device=device)
    unit = 8 * (floor(k, computed_in(dtype)) + rounding(dtype))
    if device.type == "cuda" and dtype == torch.float64:
        unit *= 8  # torch.linalg.svd's Jacobi method
    for Q in (U.double(), Vh.mT.double()):
        assert (norm(Q.mT @ Q - identity) <= unit * k).all()
    exact = torch.linalg.svdvals(A.double())
    assert ((S.double() - exact).abs().amax(-1) <= unit * exact[:, 0]).all()
    rest = torch.linalg.matrix_norm((U.double() * S.double().unsqueeze(-2)) @ Vh.double() - A, 2)
    assert (rest <= math.sqrt(k) * unit * exact[:, 0]).all()


def test_svd_leaves_the_others_alone_and_refuses_what_does_not_fit(device):
    good = randn(5, 3, dtype=torch.float32).to(device)
    U, S, Vh = linalg.svd(torch.stack([good, torch.full_like(good, torch.nan)]))
    torch.testing.assert_close((U[0] * S[0]) @ Vh[0], good)
    for part in (U, S, Vh):
        assert part[1].isnan().all()
    empty = linalg.svd(torch.zeros(2, 0, 3, device=device))
    assert [x.shape for x in empty] == [(2, 0, 0), (2, 0), (2, 0, 3)]
    with pytest.raises(ValueError, match=r"svd: A has shape \[3\]"):
        linalg.svd(torch.ones(3))
    with pytest.raises(ValueError, match="svd: A is 3 "):
        linalg.svd(3)


@pytest.mark.cuda
def test_polar_and_svd_do_not_wait():
    A = randn(3, 150, 100, dtype=torch.float32).cuda()
    expected = [*linalg.polar(A), *linalg.svd(A)]
    with no_waits():
        found = [*linalg.polar(A), *linalg.svd(A)]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-40), (torch.float64, 1e-310)])
def test_denormal_singular_values_stay(dtype, scale, device):
    A = (scale * randn(6, 4)).to(device, dtype)
    exact = torch.linalg.svdvals(A.cpu().double() / scale)
    assert (linalg.svd(A).S.cpu().double() / scale - exact).abs().max() <= 1e-3 * exact[0]
    U, H, A = (each.cpu().double() for each in (*linalg.polar(A), A))
    assert norm(U @ (H / scale) - A / scale) <= 1e-3 * norm(A / scale)
