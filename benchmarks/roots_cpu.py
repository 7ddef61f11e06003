"""Inverse fourth roots of symmetric matrices on a CPU: time and error of each method."""

from __future__ import annotations

import statistics
import sys

import torch
import torchium
from common import Report, interleaved, parse_arguments, result_file
from torch import Tensor

ROOT = 4
STACKS = ((64, 64), (16, 128), (8, 256), (2, 512), (1, 1024))  # matrices, n
CONDITION = 1e4


def matrices(count: int, n: int) -> Tensor:
    """float64 [count, n, n] with a log-uniform spectrum in [1 / CONDITION, 1]."""
    generator = torch.Generator().manual_seed(n)
    Q, _ = torch.linalg.qr(torch.randn(count, n, n, dtype=torch.float64, generator=generator))
    exponent = -torch.log10(torch.tensor(CONDITION, dtype=torch.float64))
    spectrum = 10 ** (exponent * torch.rand(count, 1, n, dtype=torch.float64, generator=generator))
    return (Q * spectrum) @ Q.mT


def power_by_eigh(A: Tensor, exponent: float) -> Tensor:
    eigenvalues, Q = torch.linalg.eigh(A)
    return (Q * eigenvalues.clamp(min=1e-30).pow(exponent).unsqueeze(-2)) @ Q.mT


def main() -> int:
    arguments = parse_arguments(__doc__)
    report = Report(f"Inverse roots on a CPU (p = {ROOT}, float32, condition {CONDITION:.0e})")
    rows = []
    for count, n in STACKS:
        exact = matrices(count, n)
        A = exact.float()
        exact = power_by_eigh(A.double(), -1 / ROOT)
        methods = {
            "torch eigh": lambda A=A: power_by_eigh(A, -1 / ROOT),
            **{
                method: lambda A=A, m=method: torchium.linalg.matrix_inverse_root(A, ROOT, method=m)
                for method in ("eigh", "newton", "auto")
            },
        }
        errors = {
            k: ((f().double() - exact).norm() / exact.norm()).item() for k, f in methods.items()
        }
        seconds = interleaved(methods, max(3, arguments.rounds // 3))
        for name in methods:
            ms = 1e3 * statistics.median(seconds[name]) / count
            rows.append([n, count, name, ms, errors[name]])
    report.table(
        "One matrix of a stack", ["n", "stack", "method", "ms a matrix", "relative error"], rows
    )
    return report.finish(result_file("roots_cpu", arguments))


if __name__ == "__main__":
    sys.exit(main())
