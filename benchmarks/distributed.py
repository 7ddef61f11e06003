"""A step of Shampoo on several GPUs of one host: shared by the ranks, and repeated on each.

Gradients are the same on all ranks, as under DistributedDataParallel. One process per GPU is started. "captured": steps
without roots, replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchium
from shared.process_group import free_port, join_group, start_ranks
from torch import Tensor, nn

# Matrices, biases and norms of a decoder: width, layers, vocabulary.
MODELS = {"103M": (768, 9, 50304), "308M": (1024, 20, 50304), "tiny": (32, 2, 100)}


def parameters(width: int, layers: int, words: int, device: torch.device) -> list[nn.Parameter]:
    shapes: list[tuple[int, ...]] = [(words, width)]
    for _ in range(layers):
        shapes += [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
        shapes += [(width,)] * 6 + [(4 * width,)]
    generator = torch.Generator(device).manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, device=device) * 0.02)
        for shape in shapes
    ]


def seconds_of_step(
    optimizer: Any, params: list[nn.Parameter], warm_up: int, steps: int, captured: bool
) -> float:
    """The mean of some steps, after others for state, graphs and buffers."""
    device = params[0].device
    for _ in range(warm_up):
        optimizer.step()
    optimizer.check_errors()
    step: Callable[[], object] = optimizer.step
    if captured:
        optimizer.update_preconditioners()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            optimizer.step()
        step = graph.replay
        step()
        torch.cuda.synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return (time.perf_counter() - begin) / steps


def state_bytes(optimizer: Any) -> int:
    tensors: list[Tensor] = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.nbytes for t in tensors)


def measure(rank: int, ranks: int, port: int, model: str, steps: int, on_gpu: bool) -> None:
    device = join_group(rank, ranks, port, on_gpu)
    if rank == 0:
        print(
            f"{'roots':>12} {'repeated ms':>12} {'shared ms':>10} {'ratio':>6} {'state ratio':>12}"
        )
    # The first roots are computed more often than update_freq says; the next after step 128 at 160.
    for name, update_freq, warm_up in (
        ("every step", 1, 4 if on_gpu else 1),
        ("never", 10**6, 128 if on_gpu else 1),
        ("captured", 10**6, 4),
    ):
        captured = name == "captured"
        if captured and not on_gpu:
            continue
        times, states = [], []
        for group in (None, dist.group.WORLD):
            params = parameters(*MODELS[model], device)
            for p in params:
                p.grad = p.detach() * 0.1
            optimizer = torchium.Shampoo.from_adamw(
                params, update_freq=update_freq, process_group=group, capturable=captured
            )
            times.append(seconds_of_step(optimizer, params, warm_up, steps, captured))
            states.append(state_bytes(optimizer))
            del optimizer, params
        if rank == 0:
            print(
                f"{name:>12} {1e3 * times[0]:12.2f} {1e3 * times[1]:10.2f} "
                f"{times[1] / times[0]:6.2f} {states[1] / states[0]:12.2f}",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="103M")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--dry-run", action="store_true", help="two processes on the CPU, small")
    arguments = parser.parse_args()
    ranks = 2 if arguments.dry_run else arguments.ranks
    model, steps = ("tiny", 2) if arguments.dry_run else (arguments.model, arguments.steps)
    on_gpu = not arguments.dry_run
    start_ranks(measure, (ranks, free_port(), model, steps, on_gpu), ranks, on_gpu)


if __name__ == "__main__":
    main()
