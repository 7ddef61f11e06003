"""A step of Shampoo on several GPUs of one host: shared by the ranks, and repeated on each.

One process per GPU is started. "replicated": gradients are the same on all ranks, as under DistributedDataParallel.
"aligned": rows as fully_shard cuts them, in multiples of the block size, so that no matrix travels. "captured": steps
without roots, replayed from a CUDA graph.

"exchange" is the time in which directions travel and the ranks agree while nothing else runs; "own work" the shared step of
the slowest rank in a group that moves nothing; "exposed" what the shared step takes longer than that.

The last table is the plan of a decoder for more ranks: the busiest rank's work, and what it sends.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchium
from shared.common import Report
from shared.process_group import device_of_rank, free_port, join_group, start_ranks
from sharing_parts.exchange import seconds_of_exchange, silent_group
from sharing_parts.plan import HEADERS, MIB, bytes_sent, plan_rows, sharded_rows
from torch import Tensor, nn

# Matrices, biases and norms of a decoder: width, layers, vocabulary.
MODELS = {"103M": (768, 9, 50304), "308M": (1024, 20, 50304), "tiny": (32, 2, 100)}
LAYOUTS = ("replicated", "aligned")
COLUMNS = [
    "layout",
    "roots",
    "repeated ms",
    "shared ms",
    "ratio",
    "state ratio",
    "MiB sent per rank",
]
COLUMNS += ["exchange ms", "GB/s", "own work ms", "exposed ms", "hidden %"]
# Of two ranks: shared / repeated.
TARGETS = {("replicated", "every step"): 0.56, ("replicated", "never"): 0.65}
STATE_TARGET = 0.52
ALIGNED_TARGET = 1.05  # times the share of a rank
EXPOSED_TARGET = 0.2  # of the exchange
ROUNDS = 5


@dataclass(frozen=True)
class Case:
    layout: str
    roots: str
    update_freq: int
    warm_up: int

    @property
    def is_captured(self) -> bool:
        return self.roots == "captured"


def cases(layouts: list[str], on_gpu: bool) -> list[Case]:
    # The first roots are computed more often than update_freq says; the next after step 128 at 160.
    roots = [("every step", 1, 4 if on_gpu else 1), ("never", 10**6, 128 if on_gpu else 1)]
    roots += [("captured", 10**6, 4)] if on_gpu else []
    return [Case(layout, *each) for layout in layouts for each in roots]


def shapes_of(model: str, layout: str) -> list[tuple[int, ...]]:
    width, layers, words = MODELS[model]
    if layout == "aligned":
        words -= words % width
    shapes: list[tuple[int, ...]] = [(words, width)]
    for _ in range(layers):
        shapes += [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
        shapes += [(width,)] * 6 + [(4 * width,)]
    return shapes


def parameters(
    shapes: list[tuple[int, ...]], device: torch.device, is_sharded: bool
) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    values = [torch.randn(shape, generator=generator, device=device) * 0.02 for shape in shapes]
    if not is_sharded:
        return [nn.Parameter(v) for v in values]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [sharded_rows(v.chunk(ranks)[rank].clone(), tuple(v.shape)) for v in values]


def seconds_of_step(optimizer: Any, device: torch.device, case: Case, steps: int) -> float:
    """The median of some rounds, each the mean of some steps, after others for state, graphs and buffers."""
    for _ in range(case.warm_up):
        optimizer.step()
    optimizer.check_errors()
    step: Callable[[], object] = optimizer.step
    if case.is_captured:
        optimizer.update_preconditioners()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            optimizer.step()
        step = graph.replay
        step()
        torch.cuda.synchronize(device)
    rounds = []
    for _ in range(ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        rounds.append((time.perf_counter() - begin) / steps)
    return statistics.median(rounds)


@dataclass
class Measured:
    seconds: float
    state_bytes: int
    own_elements: int  # whose directions the rank computes
    sent: float  # bytes, by each rank to all others


def run(case: Case, model: str, steps: int, device: torch.device, is_shared: bool) -> Measured:
    ranks, is_sharded = dist.get_world_size(), is_shared and case.layout == "aligned"
    shapes = shapes_of(model, case.layout)
    params = parameters(shapes, device, is_sharded)
    for p in params:
        p.grad = p.detach() * 0.1
    options: dict[str, Any] = {"update_freq": case.update_freq, "capturable": case.is_captured}
    if case.layout == "aligned":
        options["block_size"] = MODELS[model][0] // ranks
    if is_shared and not is_sharded:
        options["process_group"] = dist.group.WORLD
    optimizer: Any = torchium.Shampoo.from_adamw(params, **options)
    seconds = seconds_of_step(optimizer, device, case, steps)
    states: list[dict[str, Tensor]] = list(optimizer.state.values())
    own = sum(state["exp_avg"].numel() for state in states)
    sent = 4.0 * own * (ranks - 1) if is_shared else 0.0
    if is_sharded:
        matrices = [p for p in params if "statistics.0" in optimizer.state[p]]
        owners = [optimizer._plans.owners(optimizer._shards.of(p)) for p in matrices]
        of_ranks = bytes_sent(
            [p.shape for p in matrices], owners, ranks, options["block_size"], True
        )
        sent = max(map(sum, zip(*of_ranks, strict=True)))
    return Measured(seconds, sum(t.nbytes for s in states for t in s.values()), own, sent)


def largest(value: float, device: torch.device) -> float:
    """Of all ranks."""
    tensor = torch.tensor(value, dtype=torch.double, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def row(
    report: Report, case: Case, alone: Measured, shared: Measured, own: float, device: torch.device
) -> list[object]:
    """Of the table, on all ranks; those but the first have no use for it."""
    ranks = dist.get_world_size()
    travels = case.layout == "replicated"
    elements = int(largest(shared.own_elements, device)) if travels else 0
    exchange = seconds_of_exchange(elements, device)
    sent = largest(shared.sent, device)
    ratio = shared.seconds / alone.seconds
    state = largest(shared.state_bytes, device) / alone.state_bytes
    name = f"{case.layout}, roots {case.roots}"
    if travels and ranks == 2:
        report.check(f"{name}: state of a rank / whole", state, STATE_TARGET)
        if target := TARGETS.get((case.layout, case.roots)):
            report.check(f"{name}: shared / repeated", ratio, target)
    if not travels:
        report.check(f"{name}: shared / repeated, times ranks", ratio * ranks, ALIGNED_TARGET)
    result = [case.layout, case.roots, 1e3 * alone.seconds, 1e3 * shared.seconds, ratio, state]
    result += [sent / MIB, 1e3 * exchange, 1e-9 * sent / exchange if sent else None]
    if not own:
        return [*result, None, None, None]
    exposed = max(0.0, shared.seconds - own)
    report.check(f"{name}: exposed / exchange", exposed / exchange, EXPOSED_TARGET)
    return [*result, 1e3 * own, 1e3 * exposed, 100 * max(0.0, 1 - exposed / exchange)]


def measure(
    rank: int, ranks: int, port: int, arguments: argparse.Namespace, missed: Tensor
) -> None:
    warnings.simplefilter("ignore")
    on_gpu, model, steps = not arguments.dry_run, arguments.model, arguments.steps
    device = device_of_rank(rank, on_gpu)
    todo = cases(arguments.layouts, on_gpu)
    own: dict[Case, float] = {}
    with silent_group(rank, ranks, device):
        for case in todo:
            if case.layout == "replicated" and not case.is_captured:
                own[case] = run(case, model, steps, device, True).seconds
    join_group(rank, ranks, port, on_gpu)
    report = Report(f"A step of Shampoo shared by {ranks} ranks, {model}", is_quiet=rank > 0)
    rows = []
    for case in todo:
        alone, shared = (run(case, model, steps, device, shares) for shares in (False, True))
        slowest = largest(own.get(case, 0.0), device)
        rows.append(row(report, case, alone, shared, slowest, device))
    dist.destroy_process_group()
    if rank == 0:
        report.table("Steps", COLUMNS, rows)
        report.table("Plans", HEADERS, plan_rows(arguments.layers, arguments.plan_ranks))
        missed.fill_(report.finish(arguments.save))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="103M")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--plan-ranks", nargs="*", type=int, default=[4, 8, 64, 512])
    parser.add_argument("--layers", type=int, default=24, help="of the decoder in the plans")
    parser.add_argument("--save", type=Path, help="write the tables to this file")
    parser.add_argument("--dry-run", action="store_true", help="two processes on the CPU, small")
    arguments = parser.parse_args()
    if arguments.dry_run:
        small = {"model": "tiny", "steps": 2, "ranks": 2, "plan_ranks": [4], "layers": 1}
        vars(arguments).update(small)
    ranks, missed = arguments.ranks, torch.zeros((), dtype=torch.long).share_memory_()
    start_ranks(measure, (ranks, free_port(), arguments, missed), ranks, not arguments.dry_run)
    return 0 if arguments.dry_run else int(missed)


if __name__ == "__main__":
    sys.exit(main())
