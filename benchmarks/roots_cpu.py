"""Inverse fourth roots of symmetric matrices on a CPU: time and error of each method."""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable

import torch
import torchium
from shared.common import Report, interleaved, parse_arguments, repeated, result_file
from torch import Tensor

ROOT = 4
ORDERS = (32, 64, 96, 128, 192, 256, 512, 1024, 2048)
COUNTS = (1, 4, 32)
LARGEST_BATCH = 4 * 1024**2  # elements: larger inputs take minutes without new information
CONDITION = 1e4
SHORTEST_ROUND = 2e-2  # seconds: shorter calls are repeated
AT_MOST = 1.1  # "auto" over the fastest


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


def methods(A: Tensor) -> dict[str, Callable[[], Tensor]]:
    ours = {
        method: functools.partial(torchium.linalg.matrix_inverse_root, A, ROOT, method=method)
        for method in ("eigh", "newton", "auto")
    }
    return {"torch eigh": functools.partial(power_by_eigh, A, -1 / ROOT), **ours}


def milliseconds(functions: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Per call of each function, the median over rounds."""
    (first,) = interleaved({"": functions["auto"]}, 1)[""]
    times = max(1, math.ceil(SHORTEST_ROUND / first))
    repeats = {name: repeated(function, times) for name, function in functions.items()}
    seconds = interleaved(repeats, rounds if times > 1 else max(3, rounds // 3))
    return {name: 1e3 * statistics.median(each) / times for name, each in seconds.items()}


def measure(report: Report, threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    rows = []
    for n in ORDERS:
        for count in COUNTS:
            if count > 1 and count * n * n > LARGEST_BATCH:
                continue
            A = matrices(count, n)
            exact = power_by_eigh(A, -1 / ROOT)
            functions = methods(A.float())
            errors = {
                name: ((function().double() - exact).norm() / exact.norm()).item()
                for name, function in functions.items()
            }
            ms = milliseconds(functions, rounds)
            fastest = min(ms[name] for name in functions if name != "auto")
            rows.append([n, count, *ms.values(), errors["eigh"], errors["newton"], errors["auto"]])
            report.check(
                f'"auto" / fastest, n = {n}, {count} matrices, {threads} threads',
                ms["auto"] / fastest,
                AT_MOST,
            )
    report.table(
        f"Milliseconds per batch, {threads} threads",
        ["n", "matrices", *functions, "error of eigh", "error of newton", "error of auto"],
        rows,
    )


def main() -> int:
    arguments = parse_arguments(__doc__)
    report = Report(f"Inverse roots on a CPU (p = {ROOT}, float32, condition {CONDITION:.0e})")
    all_threads = torch.get_num_threads()
    one_alone = arguments.threads or all_threads == 1
    for threads in [all_threads] if one_alone else [1, all_threads]:
        measure(report, threads, arguments.rounds)
    return report.finish(result_file("roots_cpu", arguments))


if __name__ == "__main__":
    sys.exit(main())
