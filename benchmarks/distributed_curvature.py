"""Training steps with K-FAC and natural gradient under DistributedDataParallel, on several GPUs of one host.

Each rank has its own samples, as many as one process alone. Times are those of a whole step: forward and backward
pass, with the all-reduce of the gradients between ranks, and the step of the optimizer. One process per GPU is
started, after one alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torchium
from networks.curvature_models import gpt2_blocks, mlp, resnet50
from shared.process_group import free_port, join_group, start_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 21  # steps for state, graphs and the first inverses
ROUNDS = 5  # of 10 steps with each optimizer in turn: hosts and clocks change
Make = Callable[[nn.Module, Any], Any]


def kfac(**options: Any) -> Make:
    return lambda model, group: torchium.KFAC(model, lr=1e-4, process_group=group, **options)


def natural_gradient(**options: Any) -> Make:
    return lambda model, group: torchium.NaturalGradient(
        model, lr=1e-4, solver="gram", process_group=group, **options
    )


def sgd(model: nn.Module, group: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=1e-4)


KFAC = {
    "K-FAC, TCov 1, TInv 10": kfac(TCov=1, TInv=10),
    "K-FAC, TCov 1, TInv 10, one worker": kfac(TCov=1, TInv=10, grad_worker_fraction=1e-6),
    "K-FAC, TCov 10, TInv 100": kfac(TCov=10, TInv=100),
}
GRAM = {
    "natural gradient": natural_gradient(),
    "natural gradient, graphs": natural_gradient(graphs="always"),
    "natural gradient, every 10": natural_gradient(update_freq=10),
    "natural gradient, every 10, graphs": natural_gradient(update_freq=10, graphs="always"),
}
# The model, the shape of a rank's inputs, classes (0: targets like the inputs) and the optimizers.
TASKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, dict[str, Make]]] = {
    "GPT-2 small, 12 blocks, 8 x 1024 tokens": (gpt2_blocks, (8, 1024, 768), 0, KFAC),
    "ResNet-50, batch 64 of 224 x 224": (resnet50, (64, 3, 224, 224), 1000, KFAC),
    "MLP 784-1024-1024-10, batch 512": (mlp, (512, 784), 10, {**KFAC, **GRAM}),
}
TINY = {"tiny MLP": (lambda: mlp(tiny=True), (8, 784), 10, {**KFAC, **GRAM})}


def milliseconds(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, steps: int) -> float:
    """The mean of some steps."""
    loss_fn = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
    low_precision = x.is_cuda and x.dim() > 2

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16) if low_precision else nullcontext():
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()

    def wait() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return 1e3 * (time.perf_counter() - begin) / steps


def measure(rank: int, ranks: int, folder: str, port: int, on_gpu: bool) -> None:
    """One process leaves its times in the folder; several print theirs beside them."""
    torch.backends.cudnn.benchmark = True
    warnings.simplefilter("ignore")
    device, group = torch.device("cuda" if on_gpu else "cpu"), None
    if ranks > 1:
        device = join_group(rank, ranks, port, on_gpu)
        group = dist.group.WORLD
    results = Path(folder, "alone.json")
    alone = json.loads(results.read_text()) if results.exists() else {}
    times: dict[str, dict[str, float]] = {}
    for name, (build, shape, classes, optimizers) in (TASKS if on_gpu else TINY).items():
        generator = torch.Generator(device).manual_seed(rank)
        x = torch.randn(shape, device=device, generator=generator)
        y = torch.randn_like(x)
        if classes:
            y = torch.randint(classes, shape[:1], device=device, generator=generator)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        trained = {}
        for label, make in {"SGD": sgd, **optimizers}.items():
            torch.manual_seed(0)
            model = build().to(device)
            if x.dim() == 4:
                model = model.to(memory_format=torch.channels_last)
            if ranks > 1:
                model = DistributedDataParallel(model)
            trained[label] = (model, make(model, group))
            milliseconds(*trained[label], x, y, WARM_UP if on_gpu else 1)
        rounds = [
            {key: milliseconds(*each, x, y, 10 if on_gpu else 1) for key, each in trained.items()}
            for _ in range(ROUNDS if on_gpu else 1)
        ]
        times[name] = {key: median(each[key] for each in rounds) for key in trained}
        del trained, model  # before the group, which waits for their graphs
        if rank == 0 and alone:
            print_rows(name, alone[name], times[name])
    if not alone:
        results.write_text(json.dumps(times))
    if ranks > 1:
        dist.destroy_process_group()


def print_rows(name: str, alone: dict[str, float], shared: dict[str, float]) -> None:
    print(f"\n{name}, ms: {alone['SGD']:.2f} with SGD alone, {shared['SGD']:.2f} on all ranks")
    print(f"{'beyond SGD':36} {'alone':>7} {'shared':>7} {'ratio':>6}")
    for label in [key for key in alone if key != "SGD"]:
        one, all_ranks = alone[label] - alone["SGD"], shared[label] - shared["SGD"]
        print(f"{label:36} {one:7.2f} {all_ranks:7.2f} {all_ranks / one:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--dry-run", action="store_true", help="two processes on the CPU, small")
    arguments = parser.parse_args()
    ranks = 2 if arguments.dry_run else arguments.ranks
    on_gpu = not arguments.dry_run
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, ranks):
            start_ranks(measure, (count, folder, free_port(), on_gpu), count, on_gpu)


if __name__ == "__main__":
    main()
