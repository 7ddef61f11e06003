"""Matrix functions in float64, by their definitions."""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric_part(A: Tensor) -> Tensor:
    """(A + A^T) / 2 in float64."""
    return (A.double() + A.double().mT) / 2


def from_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    """Q diag(values) Q^T in float64 with random orthogonal Q: [..., n] -> [..., n, n]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*values.shape, values.shape[-1])
    Q = torch.linalg.qr(torch.randn(shape, dtype=torch.float64, generator=generator)).Q
    return symmetric_part((Q * values.double().unsqueeze(-2)) @ Q.mT)


def newton_bound(A: Tensor) -> Tensor:
    """The bound s of "newton": min(Frobenius norm, largest absolute row sum)."""
    A = symmetric_part(A)
    return torch.minimum(A.square().sum((-2, -1)).sqrt(), A.abs().sum(-1).amax(-1))


def damped_power(
    A: Tensor,
    exponent: float,
    eps: float = 0.0,
    relative_eps: float = 0.0,
    s: Tensor | None = None,
    floor: Tensor | None = None,
) -> Tensor:
    """(A + (eps + relative_eps s) I)^exponent, with damped eigenvalues raised to the floor.

    s: [...], by default the largest eigenvalue, or zero if that is negative.
    """
    values, Q = torch.linalg.eigh(symmetric_part(A))
    if s is None:
        s = values[..., -1].clamp(min=0)
    damped = values + (eps + relative_eps * s.double()).unsqueeze(-1)
    if floor is not None:
        damped = torch.maximum(damped, floor.double().unsqueeze(-1))
    return (Q * damped.pow(exponent).unsqueeze(-2)) @ Q.mT


def relative_error(X: Tensor, expected: Tensor) -> Tensor:
    """|X - expected|_F / |expected|_F of each matrix, in float64."""
    scale = expected.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    difference = (X.double().cpu() - expected) / scale
    return torch.linalg.matrix_norm(difference) / torch.linalg.matrix_norm(expected / scale)


def inverse_root_residual(A: Tensor, X: Tensor, root: int, damping: Tensor) -> Tensor:
    """|D X^root D - D|_F / |D|_F of each matrix with D = A + damping I."""
    n = A.shape[-1]
    D = symmetric_part(A) + damping.double()[..., None, None] * torch.eye(n, dtype=torch.float64)
    image = D @ torch.linalg.matrix_power(X.double(), root) @ D
    return torch.linalg.matrix_norm(image - D) / torch.linalg.matrix_norm(D)
