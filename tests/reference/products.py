"""Kronecker products and symmetric positive definite systems, in float64 and by definition."""

from __future__ import annotations

import torch
from torch import Tensor


def kron(A: Tensor, B: Tensor) -> Tensor:
    """Block (i, j) of the result is A[i, j] B."""
    A, B = A.double(), B.double()
    rows = [
        torch.cat([A[..., i, j, None, None] * B for j in range(A.shape[-1])], -1)
        for i in range(A.shape[-2])
    ]
    return torch.cat(rows, -2)


def damped(A: Tensor, damping: float) -> Tensor:
    """The symmetric part of A, damping added to its eigenvalues."""
    A = A.double()
    return (A + A.mT) / 2 + damping * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


def spd_inverse(A: Tensor, damping: float) -> Tensor:
    return torch.linalg.inv(damped(A, damping))


def spd_solve(A: Tensor, X: Tensor, damping: float) -> Tensor:
    return torch.linalg.solve(damped(A, damping), X.double())


def kron_solve(A: Tensor, B: Tensor, X: Tensor, damping: float) -> Tensor:
    return spd_solve(kron(damped(A, 0.0), damped(B, 0.0)), X, damping)
