"""Eigenproblems and singular values of random matrices, beside those of PyTorch."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from shared.common import Report, interleaved, median_ratio, waits
from torch import Tensor
from torchium.linalg import eigh, orthogonalize, svd


def decomposition_errors(A: Tensor, U: Tensor, S: Tensor, Vh: Tensor) -> list[float]:
    """Of S, and of U S V^T, in units of the largest singular value; of U^T U and V^T V."""
    A, U, S, Vh = (x.double() for x in (A, U, S, Vh))
    exact = torch.linalg.svdvals(A)
    largest = exact[:, :1]
    identity = torch.eye(S.shape[-1], dtype=A.dtype, device=A.device)
    rest = torch.linalg.matrix_norm((U * S.unsqueeze(-2)) @ Vh - A, 2)
    errors = [(S - exact).abs() / largest, rest / largest[:, 0]]
    errors += [U.mT @ U - identity, Vh @ Vh.mT - identity]
    return [float(error.abs().max()) for error in errors]


def measure_singular_values(report: Report, device: str, rounds: int, n: int, count: int) -> None:
    A = torch.randn(count, n, n, generator=torch.Generator().manual_seed(0)).to(device)
    functions: dict[str, Callable[[], object]] = {
        "torchium svd": lambda: svd(A),
        "torch.linalg.svd": lambda: torch.linalg.svd(A),
        "torchium orthogonalize": lambda: orthogonalize(A),
        "torchium orthogonalize, rcond=0.01": lambda: orthogonalize(A, rcond=0.01),
    }
    seconds = interleaved({k: waits(device, f) for k, f in functions.items()}, rounds)
    ours, peer, factor, _ = functions
    found = {ours: svd(A), peer: torch.linalg.svd(A)}
    rows: list[list[object]] = []
    for name in functions:
        errors = ["-"] * 4
        if name in found:
            errors = [f"{error:.1e}" for error in decomposition_errors(A, *found[name])]
        rows.append([name, 1e3 * statistics.median(seconds[name]), *errors])
    report.table(
        f"Singular values, {count} of n = {n}, float32",
        ["", "ms", "error of S", "of U S V^T", "of U^T U", "of V^T V"],
        rows,
    )
    for name in (ours, factor) if A.is_cuda else ():  # elsewhere by torch.linalg.svd
        ratio = median_ratio(seconds[name], seconds[peer])
        report.check(f"{name} / {peer}, {count} of n = {n}", ratio, 0.2)


def eigensystem_errors(A: Tensor, values: Tensor, Q: Tensor) -> list[float]:
    """Of the eigenvalues, and of A Q - Q S, in units of the largest one; of Q^T Q."""
    A, values, Q = (x.double() for x in (A, values, Q))
    exact = torch.linalg.eigvalsh(A)
    largest = exact.abs().amax(-1)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    rest = torch.linalg.matrix_norm(A @ Q - Q * values.unsqueeze(-2), 2)
    errors = [(values - exact).abs() / largest[:, None], rest / largest, Q.mT @ Q - identity]
    return [float(error.abs().max()) for error in errors]


def measure_eigenproblems(report: Report, device: str, rounds: int, n: int, count: int) -> None:
    A = torch.randn(count, n, n, generator=torch.Generator().manual_seed(0)).to(device)
    A = (A + A.mT) / 2
    functions: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "torchium eigh": lambda: eigh(A),
        "torch.linalg.eigh": lambda: torch.linalg.eigh(A),
    }
    seconds = interleaved({k: waits(device, f) for k, f in functions.items()}, rounds)
    rows: list[list[object]] = []
    for name, function in functions.items():
        errors = [f"{error:.1e}" for error in eigensystem_errors(A, *function())]
        rows.append([name, 1e3 * statistics.median(seconds[name]), *errors])
    report.table(
        f"Eigenproblems, {count} of n = {n}, float32",
        ["", "ms", "error of S", "of A Q - Q S", "of Q^T Q"],
        rows,
    )
    if A.is_cuda:  # LAPACK elsewhere
        ours, peer = functions
        ratio = median_ratio(seconds[ours], seconds[peer])
        report.check(f"{ours} / {peer}, {count} of n = {n}", ratio, 1.0)
