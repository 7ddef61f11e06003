"""Stochastic estimates by definition, in float64: one sample after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def xdiag(A: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard error of the estimates that leave one sample out of the range.

    Epperly, Tropp and Webber 2024, equation (2.6): ``diag(Q Q^T A) + w * (I - Q Q^T) A w`` for an
    orthonormal basis Q of the range of ``A W`` without the column w.
    """
    estimates = []
    for i in range(signs.shape[1]):
        others = torch.cat([signs[:, :i], signs[:, i + 1 :]], 1)
        Q, _ = torch.linalg.qr(A @ others)
        w = signs[:, i]
        image = A @ w
        estimates.append((Q @ (Q.T @ A)).diagonal() + w * (image - Q @ (Q.T @ image)))
    return mean_and_error(torch.stack(estimates, 1))


def hutchpp(A: Tensor, sketch: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Meyer et al. 2021, algorithm 1."""
    Q, _ = torch.linalg.qr(A @ sketch)
    outside = torch.eye(len(A), dtype=A.dtype) - Q @ Q.T
    rest = [w @ outside @ A @ outside @ w for w in signs.T]
    mean, error = mean_and_error(torch.stack(rest))
    return torch.trace(Q.T @ A @ Q) + mean, error


def mean_and_error(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Of the last dimension."""
    return samples.mean(-1), samples.std(-1) / samples.shape[-1] ** 0.5


def log_quadrature(A: Tensor, z: Tensor, steps: int) -> Tensor:
    """``z^T log(A) z`` by Gauss quadrature: the projection on the Krylov space of z."""
    powers = [z / z.norm()]
    for _ in range(steps - 1):
        w = A @ powers[-1]
        for _ in range(3):
            for v in powers:
                w = w - (v @ w) * v
        powers.append(w / w.norm())
    V = torch.stack(powers, 1)
    theta, X = torch.linalg.eigh(V.T @ A @ V)
    return (z @ z) * (X[0].square() * theta.log()).sum()
