"""What a shared step takes without its communication, and the communication without the step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from shared.device_clock import Clock

from sharing_parts.plan import fake_group

BUCKET = 2**25  # bytes that a rank receives at a time, as bucket_bytes
ROUNDS = 20
MESSAGE = 256  # numbers on which the ranks agree in a step, about


@contextmanager
def silent_group(rank: int, ranks: int, device: torch.device) -> Iterator[None]:
    """The default group is one that moves nothing: a shared step is the rank's own work."""
    from torch._C._distributed_c10d import FakeWork

    # The fake backend would copy the own part to those of all ranks.
    library = torch.library.Library("c10d", "IMPL")
    library.impl(
        "_allgather_base_",
        lambda output, *_: (output, FakeWork().boxed()),
        device.type.upper(),
        allow_override=True,
    )
    try:
        with fake_group(rank, ranks):
            yield
    finally:
        library._destroy()


def seconds_of_exchange(elements: int, device: torch.device) -> float:
    """While nothing else runs: all ranks get these float32 elements of each, and agree twice."""
    gather = gather_of(elements, device) if elements else lambda: None
    message = torch.zeros(MESSAGE, dtype=torch.long, device=device)

    def exchange() -> None:
        dist.all_reduce(message, dist.ReduceOp.MAX)
        dist.all_reduce(message[:1], dist.ReduceOp.MAX)
        gather()

    clock = Clock(device.type, ROUNDS)
    times = [clock.once(exchange) for _ in range(ROUNDS)]
    return statistics.median(times[ROUNDS // 4 :])


def gather_of(elements: int, device: torch.device) -> Callable[[], None]:
    """As a step does it: reads of the other ranks' memory where that is possible, else an all-gather."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(ranks) if other != rank]
    if device.type == "cuda" and all(
        torch.cuda.can_device_access_peer(rank, other) for other in others
    ):
        own = symmetric_memory.empty(elements, dtype=torch.float32, device=device)
        memory = symmetric_memory.rendezvous(own, dist.group.WORLD)
        sources = [memory.get_buffer(other, (elements,), torch.float32) for other in others]
        target = torch.empty_like(own)

        def read() -> None:
            memory.barrier()
            for source in sources:
                target.copy_(source)
            memory.barrier()

        return read

    parts = torch.zeros(elements, device=device).split(max(1, BUCKET // (4 * ranks)))
    targets = [torch.empty(ranks * part.numel(), device=device) for part in parts]

    def all_gather() -> None:
        for target, part in zip(targets, parts, strict=True):
            dist.all_gather_into_tensor(target, part)

    return all_gather
