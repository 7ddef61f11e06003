"""Host time of `optimizer.step()`, compared with AdamW.

On a GPU a step returns before it is done; each is called on an idle device, to measure the host alone. No
roots are due. Our optimizers replay CUDA graphs there; rows marked "launched" are those of graphs=False.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torchium
from shared.common import Report, interleaved, median_ratio, parse_arguments, result_file
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

WARM_UP = 128  # steps; the next roots are due at step 160
ROUNDS = 31
NEVER = 10**9

CUDA_SHAPES = {
    "52 matrices 384 x 384": [(384, 384)] * 52,
    "1,000 matrices 64 x 64": [(64, 64)] * 1000,
    "300 vectors of 1,024": [(1024,)] * 300,
}
CPU_SHAPES = {
    "1,000 matrices 8 x 8": [(8, 8)] * 1000,
    "1,000 vectors of 16": [(16,)] * 1000,
    "500 matrices 8 x 8, 500 vectors of 16": [(8, 8), (16,)] * 500,
}
# 0.15, 1.0 and 0.3 ms, on a host on which AdamW fused takes 0.146, 2.3 and 0.64: hosts differ by a factor of 1.8.
TARGET_OF_ADAMW = dict(zip(CUDA_SHAPES, (1.03, 0.43, 0.47), strict=True))
TARGET_LAUNCHED = 2  # times the above
TARGET_OF_ADAM = 0.25  # of the time of Adam foreach on a CPU

Makers = dict[str, Callable[[list[nn.Parameter]], Optimizer]]
OURS: Makers = {
    "Shampoo": partial(torchium.Shampoo, update_freq=NEVER),
    "from_adamw": partial(torchium.Shampoo.from_adamw, update_freq=NEVER, exponent_warmup=0),
    "Adagrad": torchium.Adagrad,
}
CUDA: Makers = OURS | {
    "AdamW fused": partial(AdamW, fused=True),
    "AdamW foreach": partial(AdamW, foreach=True),
}
LAUNCHED: Makers = {name: partial(make, graphs=False) for name, make in OURS.items()}
CPU: Makers = OURS | {"Adam foreach": partial(Adam, foreach=True)}


def steps(sizes: list[tuple[int, ...]], makers: Makers, device: str) -> dict[str, Callable]:
    """The step of each optimizer, each with its own parameters and gradients."""
    functions = {}
    for name, make in makers.items():
        params = [nn.Parameter(torch.randn(s, device=device)) for s in sizes]
        for p in params:
            p.grad = torch.randn_like(p)
        functions[name] = make(params).step
    for _ in range(WARM_UP):
        for function in functions.values():
            function()
    return functions


def host_seconds(sizes: list[tuple[int, ...]], makers: Makers, device: str):
    functions = steps(sizes, makers, device)
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    return interleaved(functions, ROUNDS, dict.fromkeys(functions, wait))


def milliseconds(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def on_cpu(report: Report) -> None:
    rows = []
    for what, sizes in CPU_SHAPES.items():
        seconds = host_seconds(sizes, CPU, "cpu")
        rows.append([what, *milliseconds(seconds).values()])
        ratio = median_ratio(seconds["Shampoo"], seconds["Adam foreach"])
        report.check(f"{what}: Shampoo / Adam foreach", ratio, TARGET_OF_ADAM)
    report.table("On cpu, ms per step", ["parameters", *CPU], rows)


def on_cuda(report: Report) -> None:
    rows = []
    for what, sizes in CUDA_SHAPES.items():
        launched = {f"{name}, launched": make for name, make in LAUNCHED.items()}
        seconds = host_seconds(sizes, CUDA | launched, "cuda")
        ms = milliseconds(seconds)
        rows.append([what, *(ms[name] for name in CUDA)])
        rows.append([f"{what}, launched", *(ms.get(f"{name}, launched") for name in CUDA)])
        for name, times in (("Shampoo", 1), ("Shampoo, launched", TARGET_LAUNCHED)):
            ratio = median_ratio(seconds[name], seconds["AdamW fused"])
            report.check(f"{what}: {name} / AdamW fused", ratio, times * TARGET_OF_ADAMW[what])
    report.table("On cuda, ms per step", ["parameters", *CUDA], rows)


def main() -> int:
    arguments = parse_arguments(__doc__)
    report = Report("Host time of a step")
    on_cpu(report)
    if torch.cuda.is_available():
        on_cuda(report)
    return report.finish(result_file("host_time", arguments))


if __name__ == "__main__":
    sys.exit(main())
