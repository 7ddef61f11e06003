"""Who owns which block of a decoder, and what travels, for any number of ranks, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torchium
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

Shape = tuple[int, int]
# Matrices of a decoder with layers of width 1024; all blocks are equal.
LAYER: list[Shape] = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)]
MIB = 2**20
HEADERS = ["layout", "block_size", "ranks", "largest / mean"]
HEADERS += ["MiB of gradients", "MiB of directions", "of these to each rank"]


@contextmanager
def fake_group(rank: int, ranks: int) -> Iterator[None]:
    """The default group is one whose collectives do nothing, and this process one of its ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_rows(rows: torch.Tensor, shape: Shape) -> nn.Parameter:
    """The parameter of which this rank has these rows."""
    mesh = init_device_mesh(rows.device.type, (dist.get_world_size(),))
    stride = torch.empty(shape, device="meta").stride()
    return nn.Parameter(
        DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size(shape), stride=stride)
    )


def owners_of_blocks(
    shapes: list[Shape], ranks: int, block_size: int, is_sharded: bool
) -> list[list[int]]:
    """Of each parameter, as the optimizer chooses them; in its step nothing has a gradient."""
    with fake_group(0, ranks):
        if is_sharded:
            params = [sharded_rows(torch.empty(m // ranks, n), (m, n)) for m, n in shapes]
        else:
            params = [nn.Parameter(torch.empty(shape)) for shape in shapes]
        group = None if is_sharded else dist.group.WORLD
        optimizer = torchium.Shampoo(params, block_size=block_size, process_group=group)
        optimizer.step()
        return [optimizer._plans.owners(optimizer._shards.of(p)) for p in params]


def bytes_sent(
    shapes: list[Shape], owners: list[list[int]], ranks: int, block_size: int, is_sharded: bool
) -> tuple[list[int], list[int]]:
    """By each rank to all others: gradients and directions, in float32."""
    gradients, directions = [0] * ranks, [0] * ranks
    for (m, n), of_blocks in zip(shapes, owners, strict=True):
        rows, columns = min(block_size, m), min(block_size, n)
        for block, owner in enumerate(of_blocks):
            if not is_sharded:
                directions[owner] += 4 * rows * columns * (ranks - 1)
                continue
            begin = block // (n // columns) * rows
            held = m // ranks  # rows of each rank
            for holder in range(begin // held, (begin + rows - 1) // held + 1):
                common = min(begin + rows, (holder + 1) * held) - max(begin, holder * held)
                if holder != owner:
                    gradients[holder] += 4 * common * columns
                    directions[owner] += 4 * common * columns
    return gradients, directions


def plan_rows(layers: int, counts: list[int]) -> list[list[object]]:
    """Of the busiest rank."""
    shapes = LAYER * layers
    result: list[list[object]] = []
    for layout, block_size in (("replicated", 1024), ("replicated", 512), ("rows", 512)):
        is_sharded = layout == "rows"
        for ranks in counts:
            owners = owners_of_blocks(shapes, ranks, block_size, is_sharded)
            load = [0] * ranks
            for owner in (rank for of_blocks in owners for rank in of_blocks):
                load[owner] += 1
            sent = bytes_sent(shapes, owners, ranks, block_size, is_sharded)
            gradients, directions = (max(of_ranks) / MIB for of_ranks in sent)
            balance = max(load) / (sum(load) / ranks)
            each = None if is_sharded else directions / (ranks - 1)
            result.append([layout, block_size, ranks, balance, gradients, directions, each])
    return result
