"""Whole training steps with K-FAC and natural gradient on a CUDA device, against SGD in the same run.

ResNet-50 and the blocks of GPT-2 small run under bfloat16 autocast. There K-FAC is compared with a loop over
the layers in the style of kfac-pytorch (networks/kfac_loop.py) and with that package itself, and its inverse-free
solver with the package singd, where they are installed. All steps are launched without waiting: the mean is that
of the whole loop, the others are times from the end of a step to the end of the next, on the device. With --tiny
all of it runs at small sizes, on a CPU too, to try it out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torchium
from networks.curvature_models import convnet, gpt2_blocks, mlp, resnet50
from networks.kfac_loop import KFACLoop
from shared.common import Report, parse_arguments, result_file
from shared.device_clock import Clock, synchronize
from torch import Tensor, nn
from torch.optim import Optimizer

Make = Callable[[nn.Module], Optimizer]
WARM_UP = 21
PASSES = "forward + backward"
SPIKE = 3.0  # the longest step may take this many times the median
OFTEN, SELDOM = "K-FAC, TCov 1, TInv 10", "K-FAC, TCov 10, TInv 100"
LOOP = "K-FAC in a loop over layers, TCov 1, TInv 10"
KFAC_PACKAGE = "package kfac-pytorch, inverse, TCov 1, TInv 10"
SINGD, SINGD_PACKAGE = "inverse_free, T 10", "package singd, T 10"
GRAM, CG = "natural gradient", "natural gradient, cg"
ADAMW = "AdamW, fused"
PEERS = (ADAMW, LOOP, KFAC_PACKAGE, SINGD_PACKAGE)  # their longest steps are not checked


class Passes(torch.optim.SGD):
    """Takes no steps."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pass


def kfac(**options: object) -> Make:
    return lambda model: torchium.KFAC(model, lr=1e-4, **options)


def natural_gradient(**options: object) -> Make:
    return lambda model: torchium.NaturalGradient(model, lr=1e-4, **options)


def singd(model: nn.Module) -> Optimizer:
    from singd.optim.optimizer import SINGD as Package

    return Package(model, lr=1e-4, momentum=0.9, damping=1e-3, T=10, warn_unsupported=False)


def kfac_pytorch(model: nn.Module) -> Optimizer:
    from kfac.preconditioner import KFACPreconditioner

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    preconditioner = KFACPreconditioner(
        model, inv_update_steps=10, damping=0.01, lr=1e-4, compute_method="inverse"
    )
    optimizer.register_step_pre_hook(lambda *_: preconditioner.step())
    return optimizer


COMMON: dict[str, Make] = {
    PASSES: lambda model: Passes(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
    OFTEN: kfac(TCov=1, TInv=10),
    SELDOM: kfac(TCov=10, TInv=100),
}
SMALL: dict[str, Make] = {
    **COMMON,
    f"{SELDOM}, no graphs": kfac(TCov=10, TInv=100, graphs=False),
    "K-FAC, TCov 1, TInv 10, eigh": kfac(TCov=1, TInv=10, solver="eigh"),
    "K-FAC, TCov 1, TInv 10, exact": kfac(TCov=1, TInv=10, damping_split="exact"),
    GRAM: natural_gradient(solver="gram"),
    f"{GRAM}, every 10": natural_gradient(solver="gram", update_freq=10),
    CG: natural_gradient(solver="cg"),
    f"{CG} to 1e-3": natural_gradient(solver="cg", eps=1e-3),
}
LARGE: dict[str, Make] = {
    **COMMON,
    ADAMW: lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    LOOP: lambda model: KFACLoop(model, lr=1e-4, TCov=1, TInv=10),
    SINGD: kfac(TCov=10, TInv=10, solver="inverse_free", alpha1=0.5, damping=1e-3),
}
if importlib.util.find_spec("singd") is not None:
    LARGE[SINGD_PACKAGE] = singd


GPT2 = dict(LARGE)
_kfac = importlib.util.find_spec("kfac")
if _kfac is not None and _kfac.origin is not None:  # not a folder of that name
    # It refuses gradients in channels_last.
    GPT2[KFAC_PACKAGE] = kfac_pytorch


@dataclass
class Task:
    build: Callable[..., nn.Module]
    shape: tuple[int, ...]
    classes: int  # 0: targets of the shape of the inputs
    optimizers: dict[str, Make]
    large: bool = False
    # Largest ms: beyond those of SGD, and beyond forward and backward pass.
    beyond_sgd: dict[str, float] = field(default_factory=dict)
    beyond_passes: dict[str, float] = field(default_factory=dict)


TASKS = {
    "MLP 784-1024-1024-10, batch 512": Task(
        mlp, (512, 784), 10, SMALL, beyond_passes={GRAM: 2.5, CG: 5 * 2.5}
    ),
    "ConvNet 3-64-128-256, batch 256 of 32 x 32": Task(
        convnet, (256, 3, 32, 32), 10, SMALL, beyond_passes={GRAM: 4, CG: 5 * 4}
    ),
    "ResNet-50, batch 128 of 224 x 224": Task(
        resnet50, (128, 3, 224, 224), 1000, LARGE, True, {OFTEN: 14, SELDOM: 5}
    ),
    "GPT-2 small, 12 blocks, 8 x 1024 tokens": Task(
        gpt2_blocks, (8, 1024, 768), 0, GPT2, True, {OFTEN: 20}
    ),
}
TINY = {
    "MLP": Task(partial(mlp, tiny=True), (8, 784), 10, SMALL, False, {}, {GRAM: 2.5, CG: 12.5}),
    "ConvNet": Task(partial(convnet, tiny=True), (4, 3, 8, 8), 10, SMALL),
    "blocks": Task(partial(gpt2_blocks, 1, 16, 2), (2, 8, 16), 0, GPT2, True, {OFTEN: 20}),
}


class Times(NamedTuple):
    """Milliseconds of steps."""

    mean: float
    median: float
    longest: float


def step_times(
    task: Task, make: Make, x: Tensor, y: Tensor, steps: int
) -> tuple[float, list[float]]:
    """Milliseconds: the mean of steps, and the time of each on the device."""
    torch.manual_seed(0)
    model = task.build().to(x.device)
    if task.large and x.dim() == 4:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    loss_fn = nn.functional.cross_entropy if task.classes else nn.functional.mse_loss
    optimizer = make(model)
    clock = Clock(x.device.type)

    def step() -> None:
        optimizer.zero_grad()
        autocast = (
            torch.autocast(x.device.type, torch.bfloat16)
            if task.large
            else contextlib.nullcontext()
        )
        with autocast:
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()

    for _ in range(WARM_UP if steps > 2 else 1):
        step()
    synchronize(x.device)
    start = time.perf_counter()
    marks = [clock.mark()]
    for _ in range(steps):
        step()
        marks.append(clock.mark())
    synchronize(x.device)
    mean = 1e3 * (time.perf_counter() - start) / steps
    return mean, [clock.between(*each) for each in itertools.pairwise(marks)]


def check(report: Report, name: str, task: Task, rows: dict[str, Times]) -> None:
    """The targets of a task."""
    for label, of_label in rows.items():
        if label not in PEERS:
            spike = of_label.longest / of_label.median
            report.check(f"{name}, {label}: longest step / median", spike, SPIKE)

    def beyond(label: str, base: str) -> float:
        return rows[label].mean - rows[base].mean

    for label, limit in task.beyond_sgd.items():
        share = beyond(label, "SGD") / limit
        report.check(f"{name}, {label}: ms beyond SGD / {limit:g}", share, 1.0)
    for label, limit in task.beyond_passes.items():
        share = beyond(label, PASSES) / limit
        report.check(f"{name}, {label}: ms beyond {PASSES} / {limit:g}", share, 1.0)
    for ours, theirs in ((OFTEN, LOOP), (OFTEN, KFAC_PACKAGE), (SINGD, SINGD_PACKAGE)):
        if theirs in rows:
            ratio = beyond(ours, "SGD") / beyond(theirs, "SGD")
            report.check(f"{name}: ms beyond SGD, {ours} / {theirs}", ratio, 0.2)


def main() -> int:
    arguments = parse_arguments(__doc__, device=True)
    device = torch.device(arguments.device)
    if device.type != "cuda" and not arguments.tiny:
        print("curvature_step.py needs a CUDA device; try it out with --tiny", file=sys.stderr)
        return 2
    torch.backends.cudnn.benchmark = True
    warnings.filterwarnings("ignore", message="KFAC preconditions")
    on = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    report = Report(f"Steps of K-FAC and natural gradient on {on}")
    generator = torch.Generator(device).manual_seed(0)
    rows = []
    for name, task in (TINY if arguments.tiny else TASKS).items():
        x = torch.randn(task.shape, device=device, generator=generator)
        y = torch.randn_like(x)
        if task.classes:
            y = torch.randint(task.classes, task.shape[:1], device=device, generator=generator)
        measured: dict[str, Times] = {}
        for label, make in task.optimizers.items():
            steps = 100 if "100" in label or not task.large else 40
            mean, times = step_times(task, make, x, y, 2 if arguments.tiny else steps)
            measured[label] = Times(mean, statistics.median(times), max(times))
        rows += [
            [name, label, of.mean, of.mean - measured["SGD"].mean, of.median, of.longest]
            for label, of in measured.items()
        ]
        check(report, name, task, measured)
    report.table(
        "Training steps, ms",
        ["model", "optimizer", "mean", "minus SGD", "median", "longest"],
        rows,
    )
    if arguments.tiny:  # two steps of a small model say nothing about the targets
        report.finish(None)
        return 0
    return report.finish(result_file("curvature_step", arguments))


if __name__ == "__main__":
    sys.exit(main())
