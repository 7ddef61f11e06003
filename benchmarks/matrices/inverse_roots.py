"""Test matrices, exact roots, and other methods for the benchmark of inverse roots."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torchium.linalg import eigh, matrix_inverse_root

ROOT = 4

Method = Callable[[Tensor, float], Tensor]  # of the damped matrices and the damping


def gradient_statistics(count: int, n: int, device: str) -> Tensor:
    """Averages of G G^T, G of low rank with noise: [count, n, n], condition about 5e3."""
    rank = max(1, n // 8)
    U = torch.randn(count, n, rank, device=device)
    L = torch.zeros(count, n, n, device=device)
    for _ in range(20):
        G = U @ torch.randn(count, rank, n, device=device) / math.sqrt(rank)
        G += 0.06 * torch.randn(count, n, n, device=device)
        L = 0.9 * L + 0.1 * (G @ G.mT) / n
    return L


def log_uniform(count: int, n: int, device: str) -> Tensor:
    """Eigenvalues log-uniform in [1e-8, 1]: [count, n, n]."""
    Q = torch.linalg.qr(torch.randn(count, n, n, device=device, dtype=torch.float64)).Q
    spectrum = 10 ** (-8 * torch.rand(count, 1, n, device=device, dtype=torch.float64))
    spectrum[..., 0] = 1.0
    return ((Q * spectrum) @ Q.mT).float()


def scaled(A: Tensor) -> Tensor:
    """The symmetric part, with a largest eigenvalue of 1."""
    S = (A + A.mT) / 2
    return S / eigh(S.double())[0][:, -1:, None].float()


def damped(A: Tensor, damping: float) -> Tensor:
    result = A.clone()
    result.diagonal(0, -2, -1).add_(damping)
    return result


def exact_root(D: Tensor, damping: float) -> Tensor:
    values, Q = eigh(D.double())
    return (Q * values.clamp(min=damping).pow(-1 / ROOT).unsqueeze(-2)) @ Q.mT


def float32_eigh_root(D: Tensor, damping: float) -> Tensor:
    """Eigenvalues below the damping count as the damping."""
    values, Q = eigh(D)
    f = values.double().clamp(min=damping).pow(-1 / ROOT).float()
    return (Q * f.unsqueeze(-2)) @ Q.mT


def float32_iteration(A: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """The minimax iteration with float32 products, as on the CPU: the roots, and the number of steps of each,
    0 where the iteration fails and eigh computes the root.
    """
    X, info = matrix_inverse_root(A.cpu(), ROOT, eps=damping, method="newton", return_info=True)
    return X.to(A.device), info.iterations.to(A.device)


def coupled_newton(D: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """X <- X T, M <- T^p M with T = ((p + 1) I - M) / p, from M = z D, X = z^(1/p) I with z = (p + 1) / (2
    |D|_F): the iteration of DASH (fp16 and tf32) and of Distributed Shampoo (float32), without early exit.
    4 (steps - 1) products for p = 4.
    """
    n = D.shape[-1]
    z = (ROOT + 1) / (2 * torch.linalg.matrix_norm(D))[:, None, None]
    M = (D * z).to(dtype)
    identity = torch.eye(n, device=D.device, dtype=dtype)
    X = None
    for step in range(steps):
        T = torch.add((1 + 1 / ROOT) * identity, M, alpha=-1 / ROOT)
        X = T if X is None else X @ T
        if step + 1 < steps:
            T = T @ T
            M = M @ (T @ T)
    return X.float() * z.pow(1 / ROOT)


def newton_of(steps: int, dtype: torch.dtype) -> Method:
    return lambda D, damping: coupled_newton(D, steps, dtype)


def with_tf32(function: Method) -> Method:
    def call(D: Tensor, damping: float) -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return function(D, damping)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return call
