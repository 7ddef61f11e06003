"""Operators with structure on a CPU: time and error of torchium.linalg, dense torch and cola-ml."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from shared.common import (
    Report,
    interleaved,
    median_ratio,
    parse_arguments,
    repeated,
    result_file,
)
from torch import Tensor
from torchium import linalg

OURS, COLA, DENSE = "torchium", "cola-ml", "dense torch"


@dataclass
class Task:
    name: str
    ours: Callable[[], Tensor]
    cola: Callable[[], Tensor]
    dense: Callable[[], Tensor] | None  # none: too large


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def spd(n: int) -> Tensor:
    A = randn(n, n) / n**0.5
    return A @ A.T + torch.eye(n)


def kronecker_tasks(cola: Any, m: int) -> list[Task]:
    A, B, X = spd(m), spd(m + 1), randn(m * (m + 1), 8)
    x = X[:, 0].contiguous()
    ours = linalg.Kronecker(*(linalg.Dense(M).assume("positive_definite") for M in (A, B)))
    theirs = cola.PSD(cola.ops.Kronecker(cola.PSD(cola.ops.Dense(A)), cola.PSD(cola.ops.Dense(B))))
    damped = ours + linalg.Identity(len(ours), 0.1)
    shift = cola.ops.Diagonal(torch.full((len(x),), 0.1))
    n = f"Kronecker, {m} x {m + 1}"
    small = m <= 40
    K = torch.kron(A, B) if small else None
    auto = cola.linalg.Auto
    return [
        Task(f"{n}: A @ x", lambda: ours @ x, lambda: theirs @ x, (lambda: K @ x) if small else None),
        Task(f"{n}: A @ X", lambda: ours @ X, lambda: theirs @ X, (lambda: K @ X) if small else None),
        Task(
            f"{n}: solve",
            lambda: ours.solve(X),
            lambda: cola.inv(theirs) @ X,
            (lambda: torch.linalg.solve(K, X)) if small else None,
        ),
        Task(
            f"{n}: logdet",
            lambda: ours.logdet(),
            lambda: cola.logdet(theirs, auto(), auto()),
            (lambda: torch.logdet(K)) if small else None,
        ),
        Task(
            f"{n}: (A + 0.1 I)^-1 x",
            lambda: damped.solve(x),
            lambda: cola.linalg.inv(
                cola.PSD(cola.ops.Sum(theirs, shift)), cola.linalg.CG(tol=1e-5)
            )
            @ x,
            (lambda: torch.linalg.solve(K + 0.1 * torch.eye(len(x)), x)) if small else None,
        ),
    ]  # fmt: skip


def block_tasks(cola: Any, blocks: int, m: int) -> list[Task]:
    parts = [spd(m) + i * torch.eye(m) / blocks for i in range(blocks)]
    X = randn(blocks * m, 8)
    ours = linalg.BlockDiag(*(linalg.Dense(A).assume("positive_definite") for A in parts))
    theirs = cola.ops.BlockDiag(*(cola.PSD(cola.ops.Dense(A)) for A in parts))
    n = f"{blocks} blocks of {m}"
    auto = cola.linalg.Auto
    D = torch.block_diag(*parts)
    return [
        Task(f"{n}: A @ X", lambda: ours @ X, lambda: theirs @ X, lambda: D @ X),
        Task(f"{n}: solve", lambda: ours.solve(X), lambda: cola.inv(theirs) @ X, lambda: torch.linalg.solve(D, X)),
        Task(f"{n}: logdet", lambda: ours.logdet(), lambda: cola.logdet(theirs, auto(), auto()), lambda: torch.logdet(D)),
    ]  # fmt: skip


def simple_tasks(cola: Any, n: int) -> list[Task]:
    d, x, X = randn(n).abs() + 1, randn(n), randn(n, 8)
    L = spd(n).tril()
    U = randn(n, 20) / n**0.5
    S = spd(n)
    perm = randn(n).argsort()
    ours_d, theirs_d = linalg.Diagonal(d), cola.ops.Diagonal(d)
    ours_t, theirs_t = linalg.Triangular(L), cola.ops.Triangular(L)
    ours_u = linalg.LowRankPlusDiagonal(d, U)
    theirs_u = cola.PSD(
        cola.ops.Sum(cola.ops.Product(cola.ops.Dense(U), cola.ops.Dense(U.T)), theirs_d)
    )
    ours_s, theirs_s = linalg.Dense(S).assume("positive_definite"), cola.PSD(cola.ops.Dense(S))
    ours_p, theirs_p = linalg.Permutation(perm), cola.ops.Permutation(perm, torch.float32)
    sparse = torch.sparse.spdiags(
        torch.stack([-torch.ones(n), 3 * torch.ones(n), -torch.ones(n)]),
        torch.tensor([-1, 0, 1]),
        (n, n),
    ).coalesce()
    ours_c = linalg.Sparse(sparse.to_sparse_csr()).assume("positive_definite")
    theirs_c = cola.ops.Sparse(sparse.values(), *sparse.indices(), (n, n))
    theirs_c.A = (
        sparse.to_sparse_csr()
    )  # it may confuse the entries of a row: its sort is not stable
    theirs_c = cola.PSD(theirs_c)
    low = U @ U.T + torch.diag(d)
    band = sparse.to_dense()
    auto = cola.linalg.Auto
    return [
        Task(f"diagonal, {n}: A @ x", lambda: ours_d @ x, lambda: theirs_d @ x, None),
        Task(f"diagonal, {n}: solve", lambda: ours_d.solve(x), lambda: cola.inv(theirs_d) @ x, None),
        Task(f"permutation, {n}: solve", lambda: ours_p.solve(x), lambda: cola.inv(theirs_p) @ x, None),
        Task(f"triangular, {n}: solve", lambda: ours_t.solve(X), lambda: cola.inv(theirs_t) @ X, lambda: torch.linalg.solve(L, X)),
        Task(f"dense, {n}: solve", lambda: ours_s.solve(X), lambda: cola.linalg.inv(theirs_s, cola.linalg.Cholesky()) @ X, lambda: torch.linalg.solve(S, X)),
        Task(f"dense, {n}: logdet", lambda: ours_s.logdet(), lambda: cola.logdet(theirs_s, cola.linalg.Cholesky(), auto()), lambda: torch.logdet(S)),
        Task(f"rank 20 + diagonal, {n}: solve", lambda: ours_u.solve(x), lambda: cola.linalg.inv(theirs_u, cola.linalg.CG(tol=1e-5)) @ x, lambda: torch.linalg.solve(low, x)),
        Task(f"rank 20 + diagonal, {n}: logdet", lambda: ours_u.logdet(), lambda: cola.logdet(theirs_u, cola.linalg.Cholesky(), auto()), lambda: torch.logdet(low)),
        Task(f"sparse, {n}: A @ x", lambda: ours_c @ x, lambda: theirs_c @ x, lambda: band @ x),
        Task(f"sparse, {n}: 5 largest eigenvalues", lambda: ours_c.eigs(5)[0], lambda: cola.eig(theirs_c, 5, "LM")[0], None),
        Task(f"dense, {n}: conjugate gradients", lambda: linalg.cg(ours_s, x, tol=1e-5).solution, lambda: cola.linalg.inv(theirs_s, cola.linalg.CG(tol=1e-5)) @ x, None),
        Task(f"sparse, {n}: exp(-A) x", lambda: (-ours_c).exp() @ x, lambda: cola.linalg.exp(cola.SelfAdjoint(-1.0 * theirs_c), cola.linalg.Lanczos(max_iters=50)) @ x, None),
    ]  # fmt: skip


def seconds_of(task: Task, rounds: int) -> dict[str, list[float]]:
    functions = {OURS: task.ours, COLA: task.cola}
    if task.dense is not None:
        functions[DENSE] = task.dense
    repeats = max(1, int(0.01 / max(min(warm(f) for f in functions.values()), 1e-6)))
    repeats = min(repeats, 200)
    measured = interleaved({name: repeated(f, repeats) for name, f in functions.items()}, rounds)
    return {name: [s / repeats for s in found] for name, found in measured.items()}


def warm(function: Callable[[], Tensor]) -> float:
    function()
    return min(interleaved({"": function}, 2)[""])


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def main() -> int:
    arguments = parse_arguments(__doc__.splitlines()[0], device=True)
    report = Report("Operators with structure")
    try:
        import cola
    except ImportError:
        report.skip("torchium / cola-ml", "cola-ml is not installed")
        return report.finish(None)
    if arguments.tiny:
        tasks = [*kronecker_tasks(cola, 4), *block_tasks(cola, 3, 5), *simple_tasks(cola, 30)]
    else:
        tasks = [
            *kronecker_tasks(cola, 30),
            *kronecker_tasks(cola, 300),
            *block_tasks(cola, 40, 50),
            *simple_tasks(cola, 2000),
        ]
    rows, ratios = [], []
    for task in tasks:
        seconds = seconds_of(task, arguments.rounds)
        ms = {name: 1e3 * statistics.median(found) for name, found in seconds.items()}
        ratio = median_ratio(seconds[OURS], seconds[COLA])
        ratios.append((task.name, ratio))
        difference = relative_difference(task.ours().real.sort()[0], task.cola().real.sort()[0])
        rows.append([task.name, ms[OURS], ms[COLA], ms.get(DENSE, "-"), ratio, f"{difference:.0e}"])
    report.table(
        "Time in ms, float32; relative difference of the results",
        ["", OURS, COLA, DENSE, "torchium / cola-ml", "difference"],
        rows,
    )
    for name, ratio in ratios:
        report.check(f"{name}, / cola-ml", ratio, 1.0)
    missed = report.finish(result_file("operators_cpu", arguments))
    return int(missed > 0 and not arguments.tiny)


if __name__ == "__main__":
    sys.exit(main())
