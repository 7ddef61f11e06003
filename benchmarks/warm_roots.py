"""Do old eigenbases make inverse fourth roots cheaper? Error and cost against newton.

Statistics L are averages of G G^T that decay with beta2. With a basis Q, A = L + damping I and D = Q^T A Q,
the warm root is Q F Q^T, F_ii = d_i^(-1/p), and F_ij = D_ij times the divided difference of x^(-1/p) at d_i
and d_j: correct to first order in the scaled off-diagonal part D_ij / (d_i d_j)^(1/2), whose largest row sum
is "off-diagonal" here.

A basis of a given age is the eigenbasis of L that many steps ago, computed in float32. A tracked one never
uses an eigensolver again: at every root it is improved by products alone (Ogita and Aishima 2018), Q (I + E)
with E_ij = D_ij / (d_j - d_i) and one step of Newton-Schulz, for ten roots.

Costs are in products of symmetric matrices, n^3 operations: a general product is two, one with a symmetric
result one. D and Q F Q^T take three each, Q E and Newton-Schulz two and three. The model assumes that all of
them run at the rate of newton itself, including its start and end, and ignores elementwise work: no real
program of ours would be faster.

python benchmarks/warm_roots.py --save benchmarks/results/warm_roots_h200.md
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Report
from roots import Clock, cost_of_ours, errors
from roots_baselines import ROOT, damped, with_tf32
from torch import Tensor
from torchium.linalg import eigh, matrix_inverse_root

DAMPINGS = (1e-6, 1e-4)  # in units of the largest eigenvalue
BETAS = (0.95, 0.99, 0.999)
AGES = (1, 2, 5, 10, 20, 50)
ROOTS = 10  # of a tracked basis
SIZES = ((256, 512), (1024, 64))  # n, and matrices for times
DRY_SIZES = ((16, 4), (48, 4))
DISTINCT = 4
WARM_PRODUCTS = 6
REFRESH_PRODUCTS = 5


class Statistics:
    """Averages of G G^T, G of low rank with noise, as in benchmarks/roots.py."""

    def __init__(self, n: int, beta2: float, device: str) -> None:
        self.rank = max(1, n // 8)
        self.beta2 = beta2
        self.U = torch.randn(DISTINCT, n, self.rank, device=device)
        self.sum = torch.zeros(DISTINCT, n, n, device=device)
        self.weight = 0.0
        self.advance(round(2 / (1 - beta2)))

    def advance(self, steps: int) -> Tensor:
        count, n, rank = self.U.shape
        for _ in range(steps):
            V = torch.randn(count, rank, n, device=self.U.device) / math.sqrt(rank)
            G = self.U @ V + 0.06 * torch.randn_like(self.sum)
            self.sum = torch.lerp(self.sum, (G @ G.mT) / n, 1 - self.beta2)
            self.weight = self.beta2 * self.weight + 1 - self.beta2
        return self.matrices()

    def matrices(self) -> Tensor:
        L = self.sum / self.weight
        return (L + L.mT) / 2


def rotated(A: Tensor, Q: Tensor) -> Tensor:
    D = Q.mT @ (A @ Q)
    return (D + D.mT) / 2


def off_diagonal(D: Tensor, damping: float) -> float:
    """Largest row sum of |D_ij| / (d_i d_j)^(1/2), i != j."""
    d = D.diagonal(0, -2, -1).clamp(min=damping)
    scaled = D.abs() * d.rsqrt().unsqueeze(-1) * d.rsqrt().unsqueeze(-2)
    scaled.diagonal(0, -2, -1).zero_()
    return float(scaled.sum(-1).max())


def composed(D: Tensor, Q: Tensor, damping: float) -> Tensor:
    """Q F Q^T for the root of Q D Q^T."""
    a = D.diagonal(0, -2, -1).clamp(min=damping).pow(1 / ROOT)
    left, right = a.unsqueeze(-1), a.unsqueeze(-2)
    terms = left ** (ROOT - 1)
    for j in range(1, ROOT):
        terms = terms + left ** (ROOT - 1 - j) * right**j
    F = -D / (left * right * terms)
    F.diagonal(0, -2, -1).copy_(1 / a)
    return Q @ (F @ Q.mT)


def improved(D: Tensor, Q: Tensor) -> Tensor:
    """A basis closer to eigenvectors of Q D Q^T. Vectors whose eigenvalues are too close for a first-order
    step stay unchanged.
    """
    n = D.shape[-1]
    d = D.diagonal(0, -2, -1)
    E = D / (d.unsqueeze(-2) - d.unsqueeze(-1))  # Inf and NaN where eigenvalues are the same
    E = torch.where(E.abs() <= 0.25 / math.sqrt(n), E, 0)
    Q = Q + Q @ E
    return 1.5 * Q - 0.5 * (Q @ (Q.mT @ Q))


def warm_root(A: Tensor, Q: Tensor, damping: float) -> Tensor:
    """A includes the damping."""
    return composed(rotated(A, Q), Q, damping)


def tracking_root(A: Tensor, Q: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """The root, and the basis for the next one."""
    D = rotated(A, Q)
    return composed(D, Q, damping), improved(D, Q)


def cycles(
    n: int, beta2: float, ages: tuple[int, ...], device: str
) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """Every age with a fresh and a tracked basis: statistics, and their basis."""
    statistics = Statistics(n, beta2, device)
    for age in ages:
        _, Q = eigh(statistics.matrices())
        yield age, "fresh", statistics.advance(age), Q
        for _ in range(ROOTS):
            Q = improved(rotated(statistics.advance(age), Q), Q)
        yield age, "tracked", statistics.advance(age), Q


@dataclass
class Case:
    """Matrices with a largest eigenvalue of 1, and their eigensystem in float64."""

    A: Tensor
    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, L: Tensor) -> Case:
        A = L / eigh(L)[0][:, -1:, None]
        return cls(A, *eigh(A.double()))

    def error(self, X: Tensor, damping: float) -> float:
        f = (self.values + damping).clamp(min=damping).pow(-1 / ROOT)
        return float(errors(X, (self.vectors * f.unsqueeze(-2)) @ self.vectors.mT).max())


@dataclass
class Benchmark:
    clock: Clock
    report: Report

    def times(self, n: int, matrices: int, A: Tensor, Q: Tensor) -> None:
        copies = matrices // DISTINCT
        many, bases = A.repeat(copies, 1, 1), Q.repeat(copies, 1, 1)

        def us(call: Callable[[], object]) -> float:
            return 1e6 * self.clock.seconds(call) / matrices

        rows = []
        for damping in DAMPINGS:
            D = damped(many, damping)

            def newton(damping: float = damping) -> Tensor:
                return matrix_inverse_root(many, ROOT, eps=damping, method="newton")

            def warm(D: Tensor, damping: float) -> Tensor:
                return warm_root(D, bases, damping)

            def tracking(D: Tensor, damping: float) -> Tensor:
                return tracking_root(D, bases, damping)[0]

            _, info = matrix_inverse_root(A, ROOT, eps=damping, method="newton", return_info=True)
            cost = cost_of_ours(n, int(info.iterations.max()), self.clock.device != "cpu")
            products = cost.operations / 3 / n**3
            time = us(newton)
            rows.append([damping, "newton", products, time, None, time])
            for name, method, count in (
                ("warm", warm, WARM_PRODUCTS),
                ("tracking", tracking, WARM_PRODUCTS + REFRESH_PRODUCTS),
            ):
                by_torch = us(lambda method=method, D=D, damping=damping: method(D, damping))
                coarse = with_tf32(method)
                in_tf32 = us(lambda coarse=coarse, D=D, damping=damping: coarse(D, damping))
                rows.append([damping, name, count, by_torch, in_tf32, time * count / products])
        headers = ["damping", "method", "products", "by torch, float32", "by torch, TF32", "model"]
        title = f"Microseconds per matrix, {matrices} matrices, n = {n}"
        self.report.table(title, headers, rows)

    def run(self, n: int, matrices: int, ages: tuple[int, ...]) -> None:
        rows = []
        for beta2 in BETAS:
            for age, basis, L, Q in cycles(n, beta2, ages, self.clock.device):
                case = Case.of(L)
                for damping in DAMPINGS:
                    rows.append([beta2, age, basis, damping, *self.compare(case, damping, Q)])
        headers = ["beta2", "age", "basis", "damping", "off-diagonal", "newton", "eigh", "warm"]
        headers += ["warm, TF32", "warm / newton"]
        self.report.table(f"Largest error of {DISTINCT} matrices, n = {n}", headers, rows)
        self.times(n, matrices, case.A, Q)

    def compare(self, case: Case, damping: float, Q: Tensor) -> list[float]:
        D = damped(case.A, damping)

        def by(method: str) -> float:
            X = matrix_inverse_root(case.A, ROOT, eps=damping, method=method)
            return case.error(X, damping)

        newton = by("newton")
        warm = case.error(warm_root(D, Q, damping), damping)
        coarse = with_tf32(lambda D, damping: warm_root(D, Q, damping))
        in_tf32 = case.error(coarse(D, damping), damping)
        apart = off_diagonal(rotated(D, Q), damping)
        return [apart, newton, by("eigh"), warm, in_tf32, warm / newton]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="write the tables to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="small batches on the CPU")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cpu" if arguments.dry_run else "cuda"
    name = "a CPU: a dry run" if arguments.dry_run else torch.cuda.get_device_name()
    report = Report(f"Inverse fourth roots by old eigenbases on {name}")
    benchmark = Benchmark(Clock(device, arguments.rounds), report)
    for n, matrices in DRY_SIZES if arguments.dry_run else SIZES:
        benchmark.run(n, matrices, AGES[:3] if arguments.dry_run else AGES)
    report.finish(arguments.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
