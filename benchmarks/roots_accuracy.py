"""Errors of inverse fourth roots on a CPU, for spectra of eight decades."""

from __future__ import annotations

import sys

import torch
import torchium
from shared.common import Report, parse_arguments, result_file
from torch import Tensor

ROOT = 4
COUNT = 4  # matrices per row
SETTINGS = (
    (torch.float32, 64, 1e-2),
    (torch.float32, 64, 1e-4),
    (torch.float32, 384, 1e-2),
    (torch.float32, 384, 1e-4),
    (torch.float32, 384, 1e-6),
    (torch.float64, 384, 1e-6),
)


def matrices(n: int) -> Tensor:
    """float64 [COUNT, n, n] with a log-uniform spectrum from 1 to 1e-8."""
    generator = torch.Generator().manual_seed(n)
    Q, _ = torch.linalg.qr(torch.randn(COUNT, n, n, dtype=torch.float64, generator=generator))
    spectrum = 10 ** (-8 * torch.rand(COUNT, 1, n, dtype=torch.float64, generator=generator))
    return (Q * spectrum) @ Q.mT


def root_by_lapack(A: Tensor, eps: float) -> Tensor:
    eigenvalues, Q = torch.linalg.eigh(A)
    return (Q * (eigenvalues.clamp(min=0) + eps).pow(-1 / ROOT).unsqueeze(-2)) @ Q.mT


def errors(dtype: torch.dtype, n: int, eps: float) -> list[float]:
    """Of eigh, newton and LAPACK alone."""
    A = matrices(n).to(dtype)
    exact = root_by_lapack(A.double(), eps)
    roots = [
        *(
            torchium.linalg.matrix_inverse_root(A, ROOT, eps=eps, method=method)
            for method in ("eigh", "newton")
        ),
        root_by_lapack(A, eps),
    ]
    return [((root.double() - exact).norm() / exact.norm()).item() for root in roots]


def main() -> int:
    arguments = parse_arguments(__doc__)
    report = Report(f"Errors of inverse roots on a CPU (p = {ROOT}, log-uniform from 1 to 1e-8)")
    report.table(
        f"Relative Frobenius error against float64, {COUNT} matrices",
        ["dtype", "n", "eps", "eigh", "newton", "LAPACK alone"],
        [
            [str(dtype).removeprefix("torch."), n, f"{eps:.0e}", *errors(dtype, n, eps)]
            for dtype, n, eps in SETTINGS
        ],
        floatfmt=".2g",
    )
    return report.finish(result_file("roots_accuracy_cpu", arguments))


if __name__ == "__main__":
    sys.exit(main())
