"""Cases for the test of what runs cases."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from group_tools import is_last
from ranks import case


@case(2)
def all_ranks_meet(ranks: int) -> None:
    count = torch.ones(())
    dist.all_reduce(count)
    assert count == ranks


@case(2)
def one_rank_raises(ranks: int) -> None:
    assert not is_last(), "the last rank"
    dist.barrier()


@case(2)
def one_rank_ends(ranks: int) -> None:
    if is_last():
        os._exit(3)
    dist.barrier()
