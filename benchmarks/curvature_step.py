"""Whole training steps with K-FAC and natural gradient on a CUDA device, against SGD in the same run."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torchium
from common import Report, parse_arguments, result_file
from curvature import convnet, mlp
from torch import Tensor, nn
from torch.optim import Optimizer

Make = Callable[[nn.Module], Optimizer]
STEPS = 100
WARM_UP = 21
CHECKED = ("SGD", "K-FAC, TCov 1, TInv 10", "K-FAC, TCov 10, TInv 100", "natural gradient")
SPIKE = 3.0  # the longest step may take this many times the median


def kfac(**options: object) -> Make:
    return lambda model: torchium.KFAC(model, lr=1e-4, **options)


def natural_gradient(**options: object) -> Make:
    return lambda model: torchium.NaturalGradient(model, lr=1e-4, **options)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
    "K-FAC, TCov 1, TInv 10": kfac(TCov=1, TInv=10),
    "K-FAC, TCov 10, TInv 100": kfac(TCov=10, TInv=100),
    "K-FAC, TCov 1, TInv 10, eigh": kfac(TCov=1, TInv=10, root_method="eigh"),
    "K-FAC, TCov 1, TInv 10, exact": kfac(TCov=1, TInv=10, damping_split="exact"),
    "natural gradient": natural_gradient(solver="gram"),
    "natural gradient, every 10": natural_gradient(solver="gram", update_freq=10),
    "natural gradient, cg to 1e-3": natural_gradient(solver="cg", eps=1e-3),
}


def step_times(build: Callable[[bool], nn.Module], x: Tensor, y: Tensor, make: Make) -> list[float]:
    """Milliseconds of whole steps: forward and backward pass, optimizer, and the wait for them."""
    torch.manual_seed(0)
    model = build(False).to(x.device)
    optimizer = make(model)
    times = []
    for _ in range(WARM_UP + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[WARM_UP:]


def main() -> int:
    arguments = parse_arguments(__doc__)
    if not torch.cuda.is_available():
        print("curvature_step.py needs a CUDA device", file=sys.stderr)
        return 2
    report = Report(f"Steps of K-FAC and natural gradient on {torch.cuda.get_device_name()}")
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = {
        "MLP 784-1024-1024-10, batch 512": (mlp, (512, 784)),
        "ConvNet 3-64-128-256, batch 256 of 32 x 32": (convnet, (256, 3, 32, 32)),
    }
    rows = []
    for name, (build, shape) in inputs.items():
        x = torch.randn(shape, device="cuda", generator=generator)
        y = torch.randint(10, shape[:1], device="cuda", generator=generator)
        plain = 0.0
        for label, make in OPTIMIZERS.items():
            times = step_times(build, x, y, make)
            mean, median, longest = statistics.fmean(times), statistics.median(times), max(times)
            plain = plain or mean
            rows.append([name, label, mean, mean - plain, median, longest])
            if label in CHECKED:
                report.check(f"{name}, {label}: longest step / median", longest / median, SPIKE)
    report.table(
        "Training steps, ms",
        ["model", "optimizer", "mean", "minus SGD", "median", "longest"],
        rows,
    )
    return report.finish(result_file("curvature_step", arguments))


if __name__ == "__main__":
    sys.exit(main())
