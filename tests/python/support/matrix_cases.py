"""Matrices of every spectrum, and units of rounding error for their results."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torchium.linalg import eigh, matrix_inverse_root, matrix_power

FLOATS = [torch.float32, torch.float64]
ALL_FLOATS = [*FLOATS, torch.bfloat16, torch.float16]
SPECTRA = ["spread", "clustered", "rank_deficient", "one_huge", "zero"]
SCALES = [1e-30, 1.0, 1e30]

Function = Callable[[Tensor], object]
FUNCTIONS: dict[str, Function] = {
    "eigh": eigh,
    "power": lambda A: matrix_power(A, -0.3, eps=1e-3),
    "root by eigh": lambda A: matrix_inverse_root(A, 4, eps=1e-3, method="eigh"),
    "root by newton": lambda A: matrix_inverse_root(A, 4, eps=1e-3, method="newton"),
}


def eps(dtype: torch.dtype) -> float:
    """Unit roundoff of the dtype in which operands of `dtype` are computed."""
    return torch.finfo(torch.float32 if dtype.itemsize == 2 else dtype).eps


def rounding(dtype: torch.dtype) -> float:
    """Rounding of the result: zero if it is computed in its own dtype."""
    return torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0


def subnormal(dtype: torch.dtype) -> float:
    """Spacing of the smallest numbers: the rounding error of a result, however small."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def floor(n: int, dtype: torch.dtype) -> float:
    """The floor of eigenvalues, in units of the largest: see spd_inverse."""
    return eps(dtype) * (4 + 0.25 * math.sqrt(n))


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def spectrum(kind: str, n: int) -> Tensor:
    """Eigenvalues with a largest of 1 (zero: all 0)."""
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
