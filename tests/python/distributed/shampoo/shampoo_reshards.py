"""Checkpoints of torch.distributed.checkpoint that another number of ranks loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import case, device, shared_folder
from shampoo_tools import OPTIONS, assert_agree, parameters, shampoo, train, values
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

MOVES = ((1, 2), (2, 1), (2, 3), (3, 2), (4, 2))
MOVES_OF_FLAT_STATE = ((2, 3), (3, 2))  # whose format is the same on any number of ranks
# Rows that ranks cut evenly, unevenly and within blocks.
SHAPES = [(40, 24), (33, 17), (8, 3, 3, 3), (70,)]
GIVEN = {**OPTIONS["all_buffers"], "eps": 1e-2, "root_method": "newton"}


def network() -> nn.Module:
    model = nn.Module()
    for i, p in enumerate(parameters(shapes=SHAPES)):
        model.register_parameter(f"p{i}", p)
    return model


class Members:
    """The first ranks: replicas of a network, or shards."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.group: Any = dist.new_group([*range(ranks)])
        self.mesh = DeviceMesh(device().type, [*range(ranks)])

    def includes_this(self) -> bool:
        return dist.get_rank() < self.ranks

    def model(self, is_sharded: bool) -> tuple[nn.Module, Any]:
        model = network()
        if is_sharded:
            fully_shard(model, mesh=self.mesh)
        return model, shampoo(model.parameters(), None if is_sharded else self.group, **GIVEN)

    def save(self, model: nn.Module, optimizer: Any, options: Any, folder: Path) -> None:
        with optimizer.sharding():
            state = get_optimizer_state_dict(model, optimizer, options=options)
        whole = {"model": model.state_dict(), "optimizer": state}
        dcp.save(whole, checkpoint_id=folder, process_group=self.group)

    def load(self, model: nn.Module, optimizer: Any, options: Any, folder: Path) -> None:
        with optimizer.sharding():
            state = get_optimizer_state_dict(model, optimizer, options=options)
            whole = {"model": model.state_dict(), "optimizer": state}
            dcp.load(whole, checkpoint_id=folder, process_group=self.group)
            model.load_state_dict(whole["model"])
            set_optimizer_state_dict(model, optimizer, whole["optimizer"], options=options)


def assert_resumes_on_other_numbers_of_ranks(ranks: int, is_sharded: bool, flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    expected = network()
    alone = shampoo(expected.parameters(), **GIVEN)
    train(alone, [*expected.parameters()], range(5))
    final = values(alone, [*expected.parameters()])
    members = {count: Members(count) for count in range(1, min(ranks, 4) + 1)}
    for before, after in MOVES_OF_FLAT_STATE if flatten else MOVES:
        if max(before, after) > ranks:
            continue
        folder = shared_folder() / f"{before} to {after}, {is_sharded}, {flatten}"
        saved = {}
        if members[before].includes_this():
            model, optimizer = members[before].model(is_sharded)
            train(optimizer, [*model.parameters()], range(3))
            saved = values(optimizer, [*model.parameters()])
            members[before].save(model, optimizer, options, folder)
        dist.barrier()
        if members[after].includes_this():
            model, optimizer = members[after].model(is_sharded)
            members[after].load(model, optimizer, options, folder)
            loaded = values(optimizer, [*model.parameters()])
            different = [key for key in saved if not saved[key].equal(loaded[key])]
            assert not different, (before, after, different)
            train(optimizer, [*model.parameters()], range(3, 5))
            assert_agree(values(optimizer, [*model.parameters()]), final)


@case(4)
def replicas(ranks: int) -> None:
    assert_resumes_on_other_numbers_of_ranks(ranks, is_sharded=False, flatten=False)


@case(4)
def replicas_with_flat_state(ranks: int) -> None:
    assert_resumes_on_other_numbers_of_ranks(ranks, is_sharded=False, flatten=True)


@case(4)
def shards(ranks: int) -> None:
    assert_resumes_on_other_numbers_of_ranks(ranks, is_sharded=True, flatten=False)


@case(4)
def shards_with_flat_state(ranks: int) -> None:
    assert_resumes_on_other_numbers_of_ranks(ranks, is_sharded=True, flatten=True)
