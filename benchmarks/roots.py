"""Inverse fourth roots on a CUDA device: time, error and workspace of each method; needs one."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import Report
from torch import Tensor
from torchium.linalg import eigh, matrix_inverse_root

ROOT = 4
# n, matrices, microseconds a matrix that are wanted
SIZES = (
    (16, 4096, None),
    (32, 4096, None),
    (64, 4096, 0.9),
    (128, 2048, 2.4),
    (256, 512, 6.0),
    (512, 256, 28.0),
    (1024, 64, 170.0),
    (2048, 16, 1200.0),
)
DAMPINGS = (1e-6, 1e-4)  # in units of the largest eigenvalue
DISTINCT = 4  # matrices that errors are taken over; the stack repeats them


def gradient_statistics(n: int) -> Tensor:
    """Averages of G G^T, G of low rank with noise: [DISTINCT, n, n], condition about 5e3."""
    rank = max(1, n // 8)
    U = torch.randn(DISTINCT, n, rank, device="cuda")
    L = torch.zeros(DISTINCT, n, n, device="cuda")
    for _ in range(20):
        G = U @ torch.randn(DISTINCT, rank, n, device="cuda") / math.sqrt(rank)
        G += 0.06 * torch.randn(DISTINCT, n, n, device="cuda")
        L = 0.9 * L + 0.1 * (G @ G.mT) / n
    return L


def log_uniform(n: int) -> Tensor:
    """Eigenvalues log-uniform in [1e-8, 1]: [DISTINCT, n, n]."""
    Q = torch.linalg.qr(torch.randn(DISTINCT, n, n, device="cuda", dtype=torch.float64)).Q
    spectrum = 10 ** (-8 * torch.rand(DISTINCT, 1, n, device="cuda", dtype=torch.float64))
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


def coupled_newton(D: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """X <- X T, M <- T^p M with T = ((p + 1) I - M) / p, from M = z D, X = z^(1/p) I with
    z = (p + 1) / (2 |D|_F): the iteration of DASH (fp16 and tf32) and of Distributed Shampoo
    (float32), without early exit."""
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


def with_tf32(function: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor]:
    def call(D: Tensor, damping: float) -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return function(D, damping)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return call


def microseconds(function: Callable[[], object], rounds: int) -> float:
    """Median over rounds, by events; the first call warms up."""
    function()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def workspace(function: Callable[[], Tensor], matrices: int, n: int) -> float:
    """Memory beyond the result at its peak, in floats over n^2 a matrix."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    peak = torch.cuda.max_memory_allocated() - before - result.nbytes
    return peak / 4 / matrices / n / n


def error(X: Tensor, expected: Tensor) -> float:
    difference = torch.linalg.matrix_norm(X[:DISTINCT].double() - expected)
    return float((difference / torch.linalg.matrix_norm(expected)).max())


def fp16_peak() -> float:
    """TFLOP/s of a large fp16 product on random data."""
    A, B = (torch.randn(8192, 8192, device="cuda", dtype=torch.half) for _ in range(2))
    return 2 * 8192**3 / microseconds(lambda: A @ B, 10) * 1e-6


Method = Callable[[Tensor, float], Tensor]  # of the damped matrices and the damping


def methods(n: int) -> dict[str, tuple[Method, bool]]:
    """Each method, and whether it is timed on DISTINCT matrices instead of all."""

    def newton(steps: int, dtype: torch.dtype) -> Method:
        return lambda D, damping: coupled_newton(D, steps, dtype)

    return {
        "torch.linalg.eigh alone": (lambda D, damping: torch.linalg.eigh(D)[1], True),
        "XsyevBatched": (float32_eigh_root, False),
        "coupled Newton, fp16, 10 steps": (newton(10, torch.half), False),
        "coupled Newton, fp16, 30 steps": (newton(30, torch.half), n > 512),
        "coupled Newton, tf32, 10 steps": (with_tf32(newton(10, torch.float)), n > 512),
        "coupled Newton, tf32, 30 steps": (with_tf32(newton(30, torch.float)), n > 512),
        "coupled Newton, float32, 30 steps": (newton(30, torch.float), True),
    }


def measure(report: Report, n: int, matrices: int, wanted: float | None, rounds: int) -> None:
    rows = []
    for family in (gradient_statistics, log_uniform):
        A = scaled(family(n))
        for damping in DAMPINGS:
            D = damped(A, damping)
            expected = exact_root(D, damping)
            name = f"{family.__name__}, damping {damping:g}"

            def row(method: str, call: Callable[[], Tensor], count: int) -> float:
                us = microseconds(call, rounds) / count
                of_root = "alone" not in method
                rows.append(
                    [
                        name,  # noqa: B023
                        method,
                        us,
                        error(call(), expected) if of_root else None,  # noqa: B023
                        workspace(call, count, n),
                    ]
                )
                return us

            many = A.repeat(matrices // DISTINCT, 1, 1)
            ours = lambda: matrix_inverse_root(  # noqa: E731
                many,  # noqa: B023
                ROOT,
                eps=damping,  # noqa: B023
                method="newton",
            )
            us = row("ours", ours, matrices)
            _, info = matrix_inverse_root(A, ROOT, eps=damping, method="newton", return_info=True)
            products = 5 * info.iterations.max().item() - 4
            rows[-1] += [products, 2 * products * n**3 / us * 1e-6]
            if wanted and damping == DAMPINGS[0]:
                report.check(f"n = {n}, {name}", us / wanted, 1.0)
            many = D.repeat(matrices // DISTINCT, 1, 1)
            for method, (function, few) in methods(n).items():
                stack = D if few else many
                row(method, lambda: function(stack, damping), stack.shape[0])  # noqa: B023
    report.table(
        f"{matrices} matrices, n = {n}",
        ["input", "method", "us a matrix", "error", "workspace / n^2", "products", "TFLOP/s"],
        rows,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, help="write the tables to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new size after this time")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    start = time.monotonic()
    report = Report(f"Inverse fourth roots on {torch.cuda.get_device_name()}")
    report.write(f"fp16 tensor peak, 8192^3: {fp16_peak():.0f} TFLOP/s")
    for n, matrices, wanted in SIZES:
        if time.monotonic() - start > arguments.seconds:
            report.skip(f"n = {n}", "out of time")
            continue
        measure(report, n, matrices, wanted, arguments.rounds)
    return report.finish(arguments.save)


if __name__ == "__main__":
    sys.exit(main())
