"""Eigenpairs and estimates of a large matrix, a b + c, inverses, powers and products of matrices.

Products in a limited workspace are measured in matrices/chunked_products.py. Lanczos' method is compared
with its passes over the matrix, and with SciPy's eigsh (CuPy's on a CUDA device) at the residual that this
reaches; estimates of the diagonal with cola-ml at an error of 1 %, where these packages are installed.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable

# CuPy's and SciPy's eigsh solve small problems with OpenBLAS, whose threads would go on to spin beside
# whatever is measured next.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from matrices.chunked_products import measure_products
from matrices.decompositions import measure_eigenproblems, measure_singular_values
from shared.common import (
    Report,
    interleaved,
    median_ratio,
    parse_arguments,
    repeated,
    result_file,
    waits,
)
from torch import Tensor
from torchium.linalg import (
    fused_mul_add,
    fused_mul_add_,
    hutchinson_diagonal,
    hutchpp,
    kron_matmul,
    kron_solve,
    lanczos,
    logdet,
    matrix_inverse_root,
    matrix_power,
    spd_inverse,
    spd_solve,
    xdiag,
)

PAIRS = 16
TOLERANCE = 1e-5
OURS = "torchium lanczos"
PRODUCTS = "its passes over the matrix"
ROUNDING = 1e-6  # residuals below it may be rounding errors of float32
COLA = "cola-ml, Hutchinson"
DIAGONAL = "torchium hutchinson_diagonal"
WANTED_ERROR = 0.01  # of the diagonal
CALLS = 10  # of a function that memory limits, so that the host is ahead


def matrix(n: int, device: str) -> Tensor:
    """Symmetric, positive definite: a bulk in (0, 1] and a tail of separate large eigenvalues."""
    generator = torch.Generator().manual_seed(0)
    bulk = torch.randn(n, n, generator=generator).to(device) / (2 * n**0.5)
    tail = torch.randn(n, 2 * PAIRS, generator=generator) / n**0.5
    tail = (tail * torch.linspace(2, 6, 2 * PAIRS).sqrt()).to(device)
    A = bulk @ bulk.T + tail @ tail.T
    A.diagonal().add_(0.01)
    return A


def eigensolvers(A: Tensor) -> dict[str, Callable[[], object]]:
    """Of other libraries, by name."""
    if A.is_cuda:
        try:
            import cupy
            from cupyx.scipy.sparse.linalg import eigsh
        except ImportError:
            return {}
        on_device = cupy.from_dlpack(A)
        return {"CuPy eigsh": lambda: _tensors(eigsh(on_device, PAIRS, tol=TOLERANCE), A)}
    from scipy.sparse.linalg import eigsh

    array = A.numpy()
    return {"SciPy eigsh": lambda: _tensors(eigsh(array, PAIRS, which="LA", tol=TOLERANCE), A)}


def _tensors(pairs: tuple, A: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.as_tensor(x, device=A.device) for x in pairs)


def largest_residual(A: Tensor, pairs: tuple[Tensor, Tensor]) -> float:
    """In units of the largest eigenvalue, computed in float64 for some rows at a time."""
    values, vectors = (x.double() for x in pairs)
    images = torch.cat([rows.double() @ vectors for rows in A.split(1024)])
    return float((images - vectors * values).norm(dim=0).max() / values.abs().max())


def measure_eigenpairs(report: Report, A: Tensor, rounds: int) -> None:
    block = 8 if A.is_cuda else 1  # the default
    passes = lanczos(A, PAIRS, tol=TOLERANCE).products // block

    def multiply() -> None:
        """As many passes over the matrix as Lanczos' method makes, one column each."""
        x = torch.ones(len(A), device=A.device)
        for _ in range(passes):
            x = A @ x

    functions: dict[str, Callable[[], object]] = {
        OURS: lambda: lanczos(A, PAIRS, tol=TOLERANCE)[:2],
        PRODUCTS: multiply,
    }
    peers = eigensolvers(A)
    for peer, solve in peers.items():
        reached = largest_residual(A, solve())
        tol = reached if reached > ROUNDING else 0.0
        functions[peer] = solve
        functions[f"{OURS} to the residual of {peer}"] = lambda tol=tol: lanczos(A, PAIRS, tol=tol)[
            :2
        ]
    seconds = interleaved({name: waits(A.device.type, f) for name, f in functions.items()}, rounds)
    rows = []
    for name, function in functions.items():
        residual = "-" if name == PRODUCTS else f"{largest_residual(A, function()):.1e}"
        ratio = median_ratio(seconds[name], seconds[PRODUCTS])
        rows.append([name, 1e3 * statistics.median(seconds[name]), ratio, residual])
    report.table(
        f"{PAIRS} largest eigenpairs, n = {len(A)}, float32, {passes} products of {block} columns",
        ["", "ms", "ratio to the passes", "largest residual"],
        rows,
    )
    report.check("lanczos / its passes", median_ratio(seconds[OURS], seconds[PRODUCTS]), 1.3)
    for peer in peers:
        ratio = median_ratio(seconds[f"{OURS} to the residual of {peer}"], seconds[peer])
        report.check(f"lanczos / {peer}, at its residual", ratio, 0.5)


def samples_for(estimate: Callable[[int], Tensor], exact: Tensor) -> int:
    """The least number of samples, in hundreds, by which an estimate has the wanted error."""
    samples = 100
    while float((estimate(samples) - exact).norm() / exact.norm()) > WANTED_ERROR:
        samples += 100
    return samples


def measure_diagonal(report: Report, A: Tensor, rounds: int) -> None:
    """Of A + I: Hutchinson's estimate of the diagonal of A to 1 % takes as many products as A has rows."""
    A = A.clone()
    A.diagonal().add_(1.0)
    n, exact = len(A), A.diagonal()
    estimates: dict[str, Callable[[int], Tensor]] = {
        DIAGONAL: lambda samples: hutchinson_diagonal(A, num_samples=samples).value
    }
    try:
        import cola
        from cola.linalg.trace.diagonal_estimation import hutchinson_diag_estimate
    except ImportError:
        report.skip("hutchinson_diagonal / cola-ml", "cola-ml is not installed")
    else:
        operator = cola.ops.Dense(A)
        # Batches of 100 with the least tolerance that it takes, so that max_iters ends it. Normal numbers, its
        # default, need many times as many samples as signs.
        estimates[COLA] = lambda samples: hutchinson_diag_estimate(
            operator, bs=100, tol=1.1e-3, max_iters=samples // 100, rand="rademacher"
        )[0]
    samples = {name: samples_for(estimate, exact) for name, estimate in estimates.items()}
    functions: dict[str, Callable[[], Tensor]] = {
        name: lambda name=name: estimates[name](samples[name]) for name in estimates
    }
    stops = f"{DIAGONAL}, tol={WANTED_ERROR}"
    functions[stops] = lambda: hutchinson_diagonal(A, num_samples=10**6, tol=WANTED_ERROR).value
    samples[stops] = hutchinson_diagonal(A, num_samples=10**6, tol=WANTED_ERROR).products
    functions["torchium xdiag, 200 products"] = lambda: xdiag(A, num_products=200).value
    seconds = interleaved({k: waits(A.device.type, f) for k, f in functions.items()}, rounds)
    rows = [
        [
            name,
            samples.get(name, 200),
            1e3 * statistics.median(seconds[name]),
            float((f() - exact).norm() / exact.norm()),
        ]
        for name, f in functions.items()
    ]
    report.table(
        f"Diagonal of A + I to {WANTED_ERROR:.0%}, n = {n}, float32",
        ["", "products", "ms", "relative error"],
        rows,
    )
    if COLA in seconds:
        ratio = median_ratio(seconds[DIAGONAL], seconds[COLA])
        report.check("hutchinson_diagonal / cola-ml, at 1 % error", ratio, 0.2)


def measure_traces(report: Report, A: Tensor, rounds: int) -> None:
    n, double = len(A), A.double()
    functions: dict[str, Callable[[], Tensor]] = {
        "trace: sum of the diagonal": lambda: double.diagonal().sum(),
        "trace: torchium hutchpp, 99 products": lambda: hutchpp(A).value,
        "log det: torch.linalg.cholesky": lambda: (
            2 * torch.linalg.cholesky(double).diagonal().log().sum()
        ),
        "log det: torchium logdet, 30 x 30 products": lambda: logdet(A).value,
    }
    seconds = interleaved({k: waits(A.device.type, f) for k, f in functions.items()}, rounds)
    values = {name: float(f()) for name, f in functions.items()}
    rows = []
    for name, value in values.items():
        target = next(v for k, v in values.items() if k.split(":")[0] == name.split(":")[0])
        rows.append([name, 1e3 * statistics.median(seconds[name]), abs(value / target - 1)])
    report.table(f"Trace and log-determinant, n = {n}", ["", "ms", "relative error"], rows)


def measure_elements(report: Report, device: str, rounds: int, n: int, dtype: torch.dtype) -> None:
    """a b + c of large matrices, which memory limits."""
    a, b, c = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    functions: dict[str, Callable[[], object]] = {
        "torchium fused_mul_add": lambda: fused_mul_add(a, b, c),
        "torch.addcmul": lambda: torch.addcmul(c, a, b),
    }
    if a.is_cuda:
        compiled = torch.compile(lambda a, b, c: a * b + c)
        functions["torch.compile of a * b + c"] = lambda: compiled(a, b, c)
    for function in functions.values():
        function()
    calls = {k: waits(device, repeated(f, CALLS)) for k, f in functions.items()}
    seconds = interleaved(calls, rounds)
    moved = 4 * a.nbytes
    rows = []
    for name in functions:
        median = statistics.median(seconds[name]) / CALLS
        rows.append([name, 1e3 * median, 1e-9 * moved / median])
    kind = str(dtype).removeprefix("torch.")
    report.table(f"a b + c, n = {n}, {kind}", ["", "ms", "GB/s"], rows)
    ours, *peers = functions
    for peer in peers if a.is_cuda else ():  # elsewhere by torch.addcmul
        ratio = median_ratio(seconds[ours], seconds[peer])
        report.check(f"fused_mul_add / {peer}, {kind}", ratio, 1.01)


def measure_lists(report: Report, device: str, rounds: int) -> None:
    """Many small tensors."""
    a, b, c = ([torch.randn(100 + i, device=device) for i in range(500)] for _ in range(3))

    def one_by_one() -> None:
        for x, y, z in zip(a, b, c, strict=True):
            z.addcmul_(x, y)

    functions: dict[str, Callable[[], object]] = {
        "torchium fused_mul_add_": lambda: fused_mul_add_(a, b, c),
        "addcmul_ in a loop": one_by_one,
        "torch._foreach_addcmul_": lambda: torch._foreach_addcmul_(c, a, b),
    }
    seconds = interleaved({k: waits(device, f) for k, f in functions.items()}, rounds)
    rows = [[name, 1e3 * statistics.median(seconds[name])] for name in functions]
    report.table("a b + c for 500 tensors of 100 to 599 numbers, float32", ["", "ms"], rows)
    ratio = median_ratio(seconds["torchium fused_mul_add_"], seconds["addcmul_ in a loop"])
    report.check("fused_mul_add_ / a loop", ratio, 0.1)


def spd_batch(n: int, count: int, device: str) -> Tensor:
    X = torch.randn(count, n, 2 * n, generator=torch.Generator().manual_seed(0))
    return (X @ X.mT / (2 * n)).to(device)


def measure_inverses(report: Report, device: str, rounds: int, n: int, count: int) -> None:
    A = spd_batch(n, count, device)
    B = torch.randn(count, n, 8, device=device)
    functions: dict[str, Callable[[], Tensor]] = {
        "torchium spd_inverse": lambda: spd_inverse(A, damping=1e-3),
        "torch cholesky + cholesky_inverse": lambda: torch.cholesky_inverse(
            torch.linalg.cholesky(A + 1e-3 * torch.eye(n, device=device))
        ),
        "torchium spd_solve, 8 columns": lambda: spd_solve(A, B, damping=1e-3),
        "torch cholesky + cholesky_solve": lambda: torch.cholesky_solve(
            B, torch.linalg.cholesky(A + 1e-3 * torch.eye(n, device=device))
        ),
    }
    seconds = interleaved({k: waits(device, f) for k, f in functions.items()}, rounds)
    D = A.double() + 1e-3 * torch.eye(n, device=device)
    exact = torch.linalg.inv(D)
    rows = []
    for name, function in functions.items():
        expected = exact @ B.double() if "solve" in name else exact
        error = float((function().double() - expected).norm() / expected.norm())
        rows.append([name, 1e3 * statistics.median(seconds[name]), error])
    report.table(
        f"Inverses and solutions, {count} of n = {n}, float32", ["", "ms", "relative error"], rows
    )
    ours, peer = list(functions)[:2]
    if A.is_cuda:  # elsewhere by Cholesky, too
        ratio = median_ratio(seconds[ours], seconds[peer])
        report.check(f"spd_inverse / {peer}, {count} of n = {n}", ratio, 1 / 3)


def measure_kronecker(report: Report, device: str, rounds: int, order: int, count: int) -> None:
    """Lists of pairs of many shapes, and a system with and without damping."""
    orders = [order // 2 + (7 * i) % (order // 2) for i in range(count)]
    A = [spd_batch(n, 1, device)[0] for n in orders]
    B = [spd_batch(n, 1, device)[0] for n in reversed(orders)]
    X = [torch.ones(len(a) * len(b), 1, device=device) for a, b in zip(A, B, strict=True)]
    largest = max(range(count), key=lambda i: len(X[i]))
    pair = A[largest], B[largest], X[largest]
    functions: dict[str, Callable[[], object]] = {
        "kron_matmul of lists": lambda: kron_matmul(A, B, X),
        "kron_matmul in a loop": lambda: [
            kron_matmul(a, b, x) for a, b, x in zip(A, B, X, strict=True)
        ],
        "kron_solve of one pair": lambda: kron_solve(*pair, 0.0),
        "kron_solve of one pair, damped": lambda: kron_solve(*pair, 1e-3),
    }
    seconds = interleaved({k: waits(device, f) for k, f in functions.items()}, rounds)
    rows = [[name, 1e3 * statistics.median(seconds[name])] for name in functions]
    report.table(
        f"{count} Kronecker products of orders {min(orders)} to {max(orders)}, float32",
        ["", "ms"],
        rows,
    )


def measure_powers(report: Report, device: str, rounds: int, n: int, count: int) -> None:
    """Powers, beside the inverse root of the order that they take."""
    A = spd_batch(n, count, device)
    roots = {-0.5: 2, -2 / 3: 3, 0.5: 2, 2.0: 2}
    functions: dict[str, Callable[[], object]] = {}
    for exponent in roots:
        functions[f"power {exponent:.3g}"] = lambda e=exponent: matrix_power(A, e)
    for root in sorted(set(roots.values())):
        functions[f"inverse root {root}"] = lambda p=root: matrix_inverse_root(A, p)
    functions["eigh"] = lambda: matrix_power(A, -0.3)
    seconds = interleaved({k: waits(device, f) for k, f in functions.items()}, rounds)
    rows = [[name, 1e3 * statistics.median(seconds[name])] for name in functions]
    report.table(f"Matrix powers, {count} of n = {n}, float32", ["", "ms"], rows)
    if device == "cuda":
        for exponent, root in roots.items():
            ratio = median_ratio(seconds[f"power {exponent:.3g}"], seconds[f"inverse root {root}"])
            report.check(f"power {exponent:.3g} / inverse root {root}", ratio, 1.3)


def main() -> int:
    arguments = parse_arguments(__doc__.splitlines()[0], device=True)
    device, rounds = arguments.device, arguments.rounds
    is_large = device.startswith("cuda") and not arguments.tiny
    n = 16384 if is_large else 400 if arguments.tiny else 2048
    size = (512, 32) if is_large else (32, 4) if arguments.tiny else (128, 16)
    report = Report("Eigenpairs, estimates, lists, powers and products")
    A = matrix(n, device)
    measure_eigenpairs(report, A, rounds)
    measure_diagonal(report, A, rounds)
    measure_traces(report, A, rounds)
    del A
    for dtype in (torch.float32, torch.bfloat16):
        measure_elements(report, device, rounds, n, dtype)
    measure_lists(report, device, rounds)
    measure_powers(report, device, rounds, *size)
    batches = [(64, 4096), (128, 1024), (256, 256), (512, 32), (1024, 8)]
    for shape in batches if is_large else [size]:
        measure_inverses(report, device, rounds, *shape)
    measure_kronecker(report, device, rounds, *size)
    several = [(512, 1), (512, 32), (1024, 1), (1024, 8)]
    for shape in several if is_large else [size]:
        measure_singular_values(report, device, min(rounds, 5), *shape)
    eigenproblems = [*several, (1025, 1), (128, 256)]
    for shape in eigenproblems if is_large else [size]:
        measure_eigenproblems(report, device, min(rounds, 5), *shape)
    measure_products(report, device, rounds, arguments.tiny)
    missed = report.finish(result_file(f"linalg_{torch.device(device).type}", arguments))
    return int(missed > 0 and not arguments.tiny)


if __name__ == "__main__":
    sys.exit(main())
