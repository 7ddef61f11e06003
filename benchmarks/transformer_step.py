"""Steps of Shampoo in the training loop of a character Transformer on a CUDA device: replayed or launched.

The host's time of `step()` in an ordinary loop, and the time between two events around it on the device.
For the latter, a second loop keeps the device busy before each step, so that it never waits for the host.
Gradients are None before each backward pass.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torchium
from learning.bible_text import load_bible
from learning.optimizers import adamw
from learning.transformer_task import TransformerTask
from networks.transformer_model import Shape
from shared.common import ROOT, Report, parse_arguments, result_file
from torch import nn
from torch.optim import Optimizer

STEPS = 260
WARM_UP = 150  # roots have their last exponent from step 100 on
LR = 1e-3
AHEAD = 10**7  # clock cycles, about 5 ms, for the host to launch a step
COLUMNS = ["host mean", "host median", "device mean", "device median", "device longest"]
OPTIMIZER_MS = 1.0  # target for the mean on the device, roots every 10 steps, one H200

Make = Callable[[nn.Module], Optimizer]


def shampoo(graphs: str, update_freq: int = 10) -> Make:
    return lambda model: torchium.Shampoo.from_adamw(
        adamw(model, LR), update_freq=update_freq, graphs=graphs
    )


OPTIMIZERS: dict[str, Make] = {
    "AdamW, fused": lambda model: adamw(model, LR),
    "Shampoo, replayed": shampoo("auto"),
    "Shampoo, launched": shampoo("never"),
    "Shampoo, replayed, roots every 1,000 steps": shampoo("auto", 1000),
}


def run(task: TransformerTask, make: Make, ahead: bool) -> tuple[float, list[float], list[float]]:
    """Milliseconds: whole step, `step()` on the host, and on the device."""
    torch.manual_seed(0)
    model = task.model().to(task.device)
    optimizer = make(model)
    batches = task.draw(STEPS, task.batch, 0)
    host, events = [], []
    begin = 0.0
    for step in range(STEPS):
        if step == WARM_UP:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        for p in model.parameters():
            p.grad = None
        task.loss(model, batches[step]).backward()
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / STEPS)
        if ahead:
            torch.cuda._sleep(AHEAD)
        around = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        around[0].record()
        start = time.perf_counter()
        optimizer.step()
        host.append(1e3 * (time.perf_counter() - start))
        around[1].record()
        events.append(around)
    torch.cuda.synchronize()
    whole = 1e3 * (time.perf_counter() - begin) / (STEPS - WARM_UP)
    device = [first.elapsed_time(last) for first, last in events]
    return whole, host[WARM_UP:], device[WARM_UP:]


def row(task: TransformerTask, make: Make) -> list[float]:
    """Milliseconds: whole step, host mean and median, device mean, median and longest."""
    whole, host, _ = run(task, make, ahead=False)
    _, _, device = run(task, make, ahead=True)
    middle = [f(times) for times in (host, device) for f in (statistics.fmean, statistics.median)]
    return [whole, *middle, max(device)]


def main() -> int:
    arguments = parse_arguments(__doc__)
    if not torch.cuda.is_available():
        print("transformer_step.py needs a CUDA device", file=sys.stderr)
        return 2
    task = TransformerTask(load_bible(ROOT / ".data"), Shape(), "cuda")
    rows = {name: row(task, make) for name, make in OPTIMIZERS.items()}
    report = Report(
        f"Shampoo's step in a Transformer's training loop on {torch.cuda.get_device_name()}"
    )
    report.table(
        "Milliseconds per step",
        ["optimizer", "whole step", *COLUMNS],
        [[name, *values] for name, values in rows.items()],
    )
    name = "Shampoo, replayed"
    report.check(f"{name}: device mean / {OPTIMIZER_MS}", rows[name][3] / OPTIMIZER_MS, 1.0)
    return report.finish(result_file("transformer_step", arguments))


if __name__ == "__main__":
    sys.exit(main())
