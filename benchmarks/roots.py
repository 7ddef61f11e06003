"""Inverse fourth roots on a CUDA device: time, error and workspace of each method.

Operations and bytes are modelled, so that methods can be compared: a product of general matrices is 2 n^3
operations, one of symmetric matrices n^3, and three times that for operands split into two fp16 terms. Bytes
count every operand read from memory and every result written, as if no data stayed in the cache between
products; up to n = 128 our kernel reads the matrix and writes its root.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matrices.costs import Cost, cost_of_coupled_newton, cost_of_ours
from matrices.inverse_roots import (
    ROOT,
    Method,
    damped,
    exact_root,
    float32_eigh_root,
    float32_iteration,
    gradient_statistics,
    log_uniform,
    newton_of,
    scaled,
    with_tf32,
)
from matrices.roofline import TITLE as ROOFLINE
from shared.common import Report
from shared.device_clock import Clock, Roofs
from torch import Tensor
from torchium.linalg import matrix_inverse_root

DAMPINGS = (1e-6, 1e-4)  # in units of the largest eigenvalue
DISTINCT = 4  # matrices for error measurement; batches repeat them


@dataclass(frozen=True)
class Size:
    n: int
    matrices: int
    target: tuple[float | None, float | None] = (None, None)  # us per matrix, for each damping
    stretch: float | None = None  # the stretch target for the first damping, us per matrix


SIZES = (
    Size(16, 4096),
    Size(32, 4096),
    Size(64, 4096, (0.9, None), 0.27),
    Size(128, 2048, (2.4, None), 0.9),
    Size(256, 512, (6.0, None), 3.6),
    Size(512, 256, (28.0, None), 17.0),
    Size(1024, 64, (170.0, 140.0), 110.0),
    Size(2048, 16, (1200.0, None), 900.0),
)
DRY_SIZES = (Size(16, 8), Size(24, 8), Size(40, DISTINCT, (1e6, None), 1e5))

ALL_VARIANTS = 1024  # the order for all variants of the coupled Newton iteration
DASH_MICROSECONDS = 287.0  # its 10 steps in fp16, n = 1024, one matrix of a batch on an H200
MOST_WORKSPACE = 8.0  # n^2 floats per matrix
ERROR_OVER_FLOAT32 = 3.0
PLOTTED = ("ours", "coupled Newton, fp16, 10 steps")
WORKSPACE = 6  # its column in the table


@dataclass(frozen=True)
class Competitor:
    name: str
    function: Method
    on_all: bool = True  # else on DISTINCT matrices
    is_timed: bool = True
    is_root: bool = True
    cost: Cost | None = None


def coupled(n: int, steps: int, kind: str, on_all: bool = True) -> Competitor:
    function = newton_of(steps, torch.half if kind == "fp16" else torch.float)
    return Competitor(
        f"coupled Newton, {kind}, {steps} steps",
        with_tf32(function) if kind == "tf32" else function,
        on_all,
        cost=cost_of_coupled_newton(n, steps, 2 if kind == "fp16" else 4),
    )


def competitors(n: int, is_first: bool) -> list[Competitor]:
    """The slow ones are timed only on the first input of an order."""
    batched = Competitor("XsyevBatched", float32_eigh_root, on_all=is_first, is_timed=is_first)
    chosen = [batched, coupled(n, 10, "fp16")]
    if is_first:
        alone = Competitor(
            "torch.linalg.eigh alone",
            lambda D, damping: torch.linalg.eigh(D)[1],
            on_all=False,
            is_root=False,
        )
        chosen = [alone, *chosen, coupled(n, 30, "float32", on_all=False)]
    if n == ALL_VARIANTS:
        chosen += [coupled(n, 30, "fp16"), coupled(n, 10, "tf32"), coupled(n, 30, "tf32")]
    return chosen


def errors(X: Tensor, expected: Tensor) -> Tensor:
    """Relative Frobenius error of each of the distinct matrices."""
    difference = torch.linalg.matrix_norm(X[:DISTINCT].double() - expected)
    return difference / torch.linalg.matrix_norm(expected)


def repeated(A: Tensor, matrices: int) -> Tensor:
    return A.repeat(matrices // A.shape[0], 1, 1)


@dataclass
class Measurement:
    """One input: a family of matrices with one damping."""

    name: str
    A: Tensor  # [DISTINCT, n, n]
    damping: float
    is_first: bool
    matrices: int


@dataclass
class Benchmark:
    clock: Clock
    report: Report
    roofs: Roofs
    has_last_step: bool = False  # for the current order
    points: list[list[object]] = field(default_factory=list)
    summary: list[list[object]] = field(default_factory=list)

    def row(
        self, case: Measurement, method: Competitor, batch: Tensor, expected: Tensor
    ) -> tuple[list[object], float | None, Tensor | None]:
        """A row of the table, us per matrix, and the errors."""
        count, n = batch.shape[:2]

        def call() -> Tensor:
            return method.function(batch, case.damping)

        us = 1e6 * self.clock.seconds(call) / count if method.is_timed else None
        result, workspace = self.clock.workspace(call)
        floats = None if workspace is None else workspace / 4 / count / n**2
        off = errors(result, expected) if method.is_root else None
        cost = method.cost
        rate = cost.operations / us * 1e-6 if cost and us else None
        row = [case.name, method.name, us, rate, rate and rate / self.roofs.peak]
        row += [cost and cost.bytes * 1e-6, floats, None if off is None else float(off.max())]
        if case.is_first and method.name in PLOTTED:
            label = f"{method.name}, n = {n}"
            self.points.append([label, cost.operations / cost.bytes, rate])
        return row, us, off

    def ours(self, case: Measurement, expected: Tensor) -> tuple[list[object], float, Tensor]:
        n = case.A.shape[-1]

        def root(A: Tensor, damping: float) -> Tensor:
            return matrix_inverse_root(A, ROOT, eps=damping, method="newton")

        _, info = matrix_inverse_root(
            case.A, ROOT, eps=case.damping, method="newton", return_info=True
        )
        iterations = int(info.iterations.max())
        reference, float32_steps = float32_iteration(case.A, case.damping)
        if case.is_first:  # a last step replaces two quadratic ones
            self.has_last_step = iterations < int(float32_steps.max())
        ours = Competitor("ours", root, cost=cost_of_ours(n, iterations, self.has_last_step))
        row, us, off = self.row(case, ours, repeated(case.A, case.matrices), expected)
        in_float32 = errors(reference, expected)
        if row[WORKSPACE] is not None:
            self.report.check(
                f"n = {n}, {case.name}: workspace", row[WORKSPACE] / MOST_WORKSPACE, 1
            )
        by_iteration = float32_steps > 0
        if bool(by_iteration.any()):
            what = f"n = {n}, {case.name}: error / that with float32 products"
            ratio = float((off / in_float32)[by_iteration].max())
            self.report.check(what, ratio, ERROR_OVER_FLOAT32)
        return [*row, float(in_float32.max())], us, off

    def measure(self, case: Measurement, size: Size) -> list[list[object]]:
        D = damped(case.A, case.damping)
        expected = exact_root(D, case.damping)
        row, us, off = self.ours(case, expected)
        rows, times = [row], {"ours": us}
        many = repeated(D, case.matrices)
        for method in competitors(size.n, case.is_first):
            batch = many if method.on_all else D
            row, times[method.name], error = self.row(case, method, batch, expected)
            rows.append([*row, None])
            if method.function is float32_eigh_root:
                what = f"n = {size.n}, {case.name}: error / that of float32 eigh"
                self.report.check(what, float(off.max() / error.max()), 1.0)
        target = size.target[DAMPINGS.index(case.damping)]
        if target:
            self.report.check(f"n = {size.n}, {case.name}: us per matrix", us / target, 1.0)
        if case.is_first:
            self.compare(size, times)
        return rows

    def compare(self, size: Size, times: dict[str, float]) -> None:
        dash = times["coupled Newton, fp16, 10 steps"]
        eighs = (times["torch.linalg.eigh alone"], times["XsyevBatched"])
        row = [size.n, size.matrices, times["ours"], size.target[0], size.stretch, *eighs, dash]
        self.summary.append(row)
        if size.n == ALL_VARIANTS:
            what = (
                f"n = {size.n}: coupled Newton, fp16, 10 steps / {DASH_MICROSECONDS:g} us of DASH"
            )
            self.report.check(what, dash / DASH_MICROSECONDS, 1.1)

    def run(self, size: Size) -> None:
        rows = []
        for family in (gradient_statistics, log_uniform):
            A = scaled(family(DISTINCT, size.n, self.clock.device))
            for damping in DAMPINGS:
                name = f"{family.__name__}, damping {damping:g}"
                case = Measurement(name, A, damping, not rows, size.matrices)
                rows += self.measure(case, size)
        headers = ["input", "method", "us per matrix", "TFLOP/s", "share of fp16 peak", "MB moved"]
        headers += ["workspace / n^2", "error", "error with float32 products"]
        self.report.table(f"{size.matrices} matrices, n = {size.n}", headers, rows)

    def finish(self) -> None:
        methods = ["torch.linalg.eigh", "XsyevBatched", "coupled Newton, fp16, 10 steps"]
        self.report.table(
            f"Microseconds per matrix, gradient statistics, damping {DAMPINGS[0]:g}",
            ["n", "matrices", "ours", "target", "stretch target", *methods],
            self.summary,
        )
        headers = ["method", "operations per byte", "TFLOP/s"]
        points = sorted(self.points, key=lambda point: point[0].startswith("coupled"))
        self.report.table(ROOFLINE, headers, points)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, help="write the tables to this file")
    parser.add_argument("--plot", type=Path, help="write the roofline to this PNG")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new size after this time")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="small batches on the CPU: a smoke test with meaningless numbers",
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    start = time.monotonic()
    device = "cpu" if arguments.dry_run else "cuda"
    name = "a CPU: a dry run" if arguments.dry_run else torch.cuda.get_device_name()
    clock = Clock(device, arguments.rounds)
    report = Report(f"Inverse fourth roots on {name}")
    roofs = Roofs.measure(clock)
    report.write(
        f"Measured in this run: memory {roofs.memory:.4g} GB/s, fp16 {roofs.peak:.3g} TFLOP/s "
        f"(a copy, and a product of order 8192)."
    )
    benchmark = Benchmark(clock, report, roofs)
    for size in DRY_SIZES if arguments.dry_run else SIZES:
        if time.monotonic() - start > arguments.seconds:
            report.skip(f"n = {size.n}", "out of time")
            continue
        benchmark.run(size)
    benchmark.finish()
    missed = report.finish(arguments.save)
    if arguments.plot:
        from matrices.roofline import draw

        draw("\n".join(report.lines), arguments.plot)
    return 0 if arguments.dry_run else missed


if __name__ == "__main__":
    sys.exit(main())
