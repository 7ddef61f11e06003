"""Products in a workspace smaller than they need, and of operands in pinned host memory.

Part of linalg.py. The bounds of a product of host operands are measured beside it: the link's rate by
a copy to the device, the device's rate by the same product of operands that lie there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from shared.common import Report, interleaved, median_ratio, waits
from torch import Tensor
from torchium.linalg import chunked_matmul

MIB = 1 << 20
IN_CORE = "torch.matmul"
LIMIT = "torchium chunked_matmul, limited"


def relative_error(C: Tensor, A: Tensor, B: Tensor) -> float:
    """Of some rows, relative to |A| |B|."""
    rows = slice(0, len(A), max(1, len(A) // 64))
    exact, scale = A[rows].double() @ B.double(), A[rows].double().abs() @ B.double().abs()
    return float(((C[rows].double() - exact).abs() / scale).max())


def measure_limited(report: Report, device: str, rounds: int, n: int, dtype: torch.dtype) -> None:
    """Operands on the device, and half of one's bytes as workspace."""
    A, B = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    limit = max(MIB, A.nbytes // 2)
    functions: dict[str, Callable[[], Tensor]] = {
        IN_CORE: lambda: A @ B,
        "torchium chunked_matmul": lambda: chunked_matmul(A, B),
        LIMIT: lambda: chunked_matmul(A, B, max_workspace_bytes=limit),
    }
    rows = []
    for name, function in functions.items():
        error = relative_error(function(), A, B)
        extra = "-"
        if device == "cuda":
            before = torch.cuda.memory_allocated() + n * n * A.element_size()
            torch.cuda.reset_peak_memory_stats()
            function()
            extra = (torch.cuda.max_memory_allocated() - before) / MIB
        rows.append([name, 0.0, extra, error])
    seconds = interleaved({k: waits(device, f) for k, f in functions.items()}, rounds)
    for row in rows:
        row[1] = 1e3 * statistics.median(seconds[row[0]])
    kind = str(dtype).removeprefix("torch.")
    report.table(
        f"Products of n = {n}, {kind}, limited to {limit / MIB:.0f} MiB of workspace",
        ["", "ms", "workspace, MiB", "error / |A| |B|"],
        rows,
    )
    if device == "cuda":
        ratio = median_ratio(seconds[LIMIT], seconds[IN_CORE])
        report.check(f"chunked_matmul / in-core, {kind}", ratio, 1.25)


def measure_host_operands(report: Report, rounds: int, m: int, k: int, n: int) -> None:
    """Both operands and the result in pinned host memory."""
    A, B = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
    host_A, host_B = A.cpu().pin_memory(), B.cpu().pin_memory()
    host_C = torch.empty(m, n, pin_memory=True)
    C = torch.empty(m, n, device="cuda")
    limit = (A.nbytes + B.nbytes) // 2

    def copies_in() -> None:
        A.copy_(host_A, non_blocking=True)
        B.copy_(host_B, non_blocking=True)

    functions: dict[str, Callable[[], object]] = {
        "host operands, limited": lambda: chunked_matmul(host_A, host_B, max_workspace_bytes=limit),
        "host operands": lambda: chunked_matmul(host_A, host_B),
        "copies to the device": copies_in,
        "copy from the device": lambda: host_C.copy_(C, non_blocking=True),
        "product of device operands": lambda: chunked_matmul(A, B),
    }
    for function in functions.values():
        function()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chunked_matmul(host_A, host_B, max_workspace_bytes=limit)
    peak = torch.cuda.max_memory_allocated() - before
    seconds = interleaved({k: waits("cuda", f) for k, f in functions.items()}, rounds)
    rows = [[name, 1e3 * statistics.median(seconds[name])] for name in functions]
    shape = f"[{m}, {k}] x [{k}, {n}]"
    report.table(
        f"Host operands, {shape}, float32, limited to {limit / MIB:.0f} MiB ({peak / MIB:.0f} used)",
        ["", "ms"],
        rows,
    )
    bound = [
        max(times) for times in zip(*(seconds[name] for name in list(functions)[2:]), strict=True)
    ]
    for name in list(functions)[:2]:
        report.check(f"{name} {shape} / what binds", median_ratio(seconds[name], bound), 1.25)


def measure_products(report: Report, device: str, rounds: int, tiny: bool) -> None:
    n = 256 if tiny else 8192 if device == "cuda" else 1024
    for dtype in (torch.float32, torch.bfloat16):
        measure_limited(report, device, rounds, n, dtype)
    if device == "cuda":
        for shape in [(256, 256, 256)] if tiny else [(32768, 16384, 16384), (131072, 4096, 1024)]:
            measure_host_operands(report, max(1, rounds // 3), *shape)
    else:
        report.skip("chunked_matmul of host operands", "no CUDA device")
