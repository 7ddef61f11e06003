"""Whether an old eigenbasis makes inverse fourth roots cheaper: error and cost against newton.

Statistics L are averages of G G^T that forget with beta2. Q is the eigenbasis of L some steps ago
(its age), made in float32. With D = Q^T A Q, A = L + damping I, the warm root is Q F Q^T,
F_ii = d_i^(-1/p), and F_ij = D_ij times the divided difference of x^(-1/p) at d_i and d_j: right to
the first order in the scaled off-diagonal part D_ij / (d_i d_j)^(1/2). "Refreshed" takes one step
of Ogita and Aishima (2018) before, which improves Q by products alone.

Costs are in products of symmetric matrices, n^3 operations. D and Q F Q^T are a general product
(two) and one with a symmetric result (one) each; a step of the refinement is three products more.
The model takes every product to run at the rate of newton's own, its start and end included, and
leaves out all that is elementwise: no program of ours would be faster.

python benchmarks/warm_roots.py --save benchmarks/results/warm_roots_h200.md
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Report
from roots import Clock, cost_of_ours, errors
from roots_baselines import ROOT, damped, exact_root, with_tf32
from torch import Tensor
from torchium.linalg import eigh, matrix_inverse_root

DAMPINGS = (1e-6, 1e-4)  # in units of the largest eigenvalue
BETAS = (0.95, 0.99, 0.999)
AGES = (1, 2, 5, 10, 20, 50)
SIZES = ((256, 512), (1024, 64))  # n, and matrices for times
DRY_SIZES = ((16, 4), (48, 4))
DISTINCT = 4
WARM_PRODUCTS = 6
REFRESH_PRODUCTS = 3


class Statistics:
    """Averages of G G^T, G of low rank with noise, as in benchmarks/roots.py."""

    def __init__(self, n: int, beta2: float, device: str) -> None:
        self.rank = max(1, n // 8)
        self.beta2 = beta2
        self.U = torch.randn(DISTINCT, n, self.rank, device=device)
        self.sum = torch.zeros(DISTINCT, n, n, device=device)
        self.weight = 0.0

    def advance(self, steps: int) -> None:
        count, n, rank = self.U.shape
        for _ in range(steps):
            V = torch.randn(count, rank, n, device=self.U.device) / math.sqrt(rank)
            G = self.U @ V + 0.06 * torch.randn_like(self.sum)
            self.sum = torch.lerp(self.sum, (G @ G.mT) / n, 1 - self.beta2)
            self.weight = self.beta2 * self.weight + 1 - self.beta2

    def matrices(self) -> Tensor:
        L = self.sum / self.weight
        return (L + L.mT) / 2


def rotated(A: Tensor, Q: Tensor) -> Tensor:
    D = Q.mT @ (A @ Q)
    return (D + D.mT) / 2


def off_diagonal(D: Tensor, d: Tensor) -> Tensor:
    """Largest row sum of |D_ij| / (d_i d_j)^(1/2), i != j: a bound of the norm."""
    scaled = D.abs() * d.rsqrt().unsqueeze(-1) * d.rsqrt().unsqueeze(-2)
    scaled.diagonal(0, -2, -1).zero_()
    return scaled.sum(-1).amax(-1)


def eigenvalues(D: Tensor, damping: float) -> Tensor:
    return D.diagonal(0, -2, -1).clamp(min=damping)


def warm_root(A: Tensor, Q: Tensor, damping: float) -> Tensor:
    """A: damped."""
    D = rotated(A, Q)
    d = eigenvalues(D, damping)
    a = d.pow(1 / ROOT)
    left, right = a.unsqueeze(-1), a.unsqueeze(-2)
    terms = sum(left ** (ROOT - 1 - j) * right**j for j in range(ROOT))
    F = D.div_(left * right * terms).neg_()
    F.diagonal(0, -2, -1).copy_(1 / a)
    return Q @ (F @ Q.mT)


def refreshed(A: Tensor, Q: Tensor) -> Tensor:
    """One step of refinement. Vectors whose eigenvalues are too close for it are made orthogonal
    only: where it would turn them by more than a tenth."""
    R = torch.eye(A.shape[-1], device=A.device) - Q.mT @ Q
    S = rotated(A, Q)
    values = S.diagonal(0, -2, -1) / (1 - R.diagonal(0, -2, -1))
    turn = (S + values.unsqueeze(-2) * R) / (values.unsqueeze(-2) - values.unsqueeze(-1))
    E = torch.where(turn.abs() <= 0.1, turn, R / 2)  # NaN on the diagonal
    return Q + Q @ E


def refreshed_root(A: Tensor, Q: Tensor, damping: float) -> Tensor:
    return warm_root(A, refreshed(A, Q), damping)


@dataclass
class Costs:
    """Microseconds a matrix."""

    newton: float
    products: float  # of newton

    def model(self, products: int) -> float:
        return self.newton * products / self.products


@dataclass
class Benchmark:
    clock: Clock
    report: Report
    best: dict[tuple[int, float, str], float]  # error over newton's, of any age and beta2

    def time(self, n: int, matrices: int, damping: float, A: Tensor, Q: Tensor) -> Costs:
        copies = matrices // DISTINCT
        many, bases = A.repeat(copies, 1, 1), Q.repeat(copies, 1, 1)
        D = damped(many, damping)
        _, info = matrix_inverse_root(A, ROOT, eps=damping, method="newton", return_info=True)
        has_last_step = self.clock.device != "cpu"
        cost = cost_of_ours(n, int(info.iterations.max()), has_last_step)
        calls = {
            "newton": lambda: matrix_inverse_root(many, ROOT, eps=damping, method="newton"),
            "warm": lambda: warm_root(D, bases, damping),
            "warm, TF32": lambda: with_tf32(warm_root_of(bases))(D, damping),
            "refreshed": lambda: refreshed_root(D, bases, damping),
            "refreshed, TF32": lambda: with_tf32(refreshed_root_of(bases))(D, damping),
        }
        us = {name: 1e6 * self.clock.seconds(call) / matrices for name, call in calls.items()}
        costs = Costs(us["newton"], cost.operations / 3 / n**3)
        rows = [
            ["newton", us["newton"], None, costs.newton, costs.products],
            ["warm", us["warm"], us["warm, TF32"], costs.model(WARM_PRODUCTS), WARM_PRODUCTS],
        ]
        products = WARM_PRODUCTS + REFRESH_PRODUCTS
        rows.append(
            ["refreshed", us["refreshed"], us["refreshed, TF32"], costs.model(products), products]
        )
        self.report.table(
            f"Microseconds a matrix, {matrices} matrices, n = {n}, damping {damping:g}",
            ["method", "float32 by torch", "TF32", "model", "products"],
            rows,
        )
        return costs

    def run(self, n: int, matrices: int, ages: tuple[int, ...]) -> None:
        rows = []
        for beta2 in BETAS:
            for age, A, Q in aged_bases(n, beta2, ages, self.clock.device):
                for damping in DAMPINGS:
                    rows.append([beta2, age, damping, *self.compare(n, damping, A, Q)])
        for damping in DAMPINGS:
            self.time(n, matrices, damping, A, Q)
        headers = ["beta2", "age", "damping", "off-diagonal", "newton", "eigh", "warm"]
        headers += ["warm, TF32", "refreshed", "refreshed, off-diagonal"]
        self.report.table(f"Largest error of {DISTINCT} matrices, n = {n}", headers, rows)

    def compare(self, n: int, damping: float, A: Tensor, Q: Tensor) -> list[float]:
        D = damped(A, damping)
        expected = exact_root(D, damping)
        better = refreshed(D, Q)

        def error(X: Tensor) -> float:
            return float(errors(X, expected).max())

        def apart(basis: Tensor) -> float:
            R = rotated(D, basis)
            return float(off_diagonal(R, eigenvalues(R, damping)).max())

        newton = error(matrix_inverse_root(A, ROOT, eps=damping, method="newton"))
        fresh = error(matrix_inverse_root(A, ROOT, eps=damping, method="eigh"))
        warm = error(warm_root(D, Q, damping))
        coarse = error(with_tf32(warm_root_of(Q))(D, damping))
        again = error(warm_root(D, better, damping))
        for name, value in (("warm", warm), ("refreshed", again)):
            key = (n, damping, name)
            self.best[key] = min(self.best.get(key, math.inf), value / newton)
        return [apart(Q), newton, fresh, warm, coarse, again, apart(better)]


def warm_root_of(Q: Tensor):
    return lambda D, damping: warm_root(D, Q, damping)


def refreshed_root_of(Q: Tensor):
    return lambda D, damping: refreshed_root(D, Q, damping)


def aged_bases(
    n: int, beta2: float, ages: tuple[int, ...], device: str
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Ages, matrices with a largest eigenvalue of 1, and the old bases."""
    statistics = Statistics(n, beta2, device)
    statistics.advance(round(2 / (1 - beta2)))
    _, Q = eigh(statistics.matrices())
    now = 0
    for age in ages:
        statistics.advance(age - now)
        now = age
        A = statistics.matrices()
        yield age, A / eigh(A.double())[0][:, -1:, None].float(), Q


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="write the tables to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="small stacks on the CPU")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cpu" if arguments.dry_run else "cuda"
    name = "a CPU: a dry run" if arguments.dry_run else torch.cuda.get_device_name()
    report = Report(f"Inverse fourth roots by old eigenbases on {name}")
    benchmark = Benchmark(Clock(device, arguments.rounds), report, {})
    ages = AGES[:2] if arguments.dry_run else AGES
    for n, matrices in DRY_SIZES if arguments.dry_run else SIZES:
        benchmark.run(n, matrices, ages)
    report.table(
        "Smallest error over newton's, of all ages and beta2",
        ["n", "damping", "method", "ratio"],
        [[*key, ratio] for key, ratio in benchmark.best.items()],
    )
    report.finish(arguments.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
