"""Checkpoints of optimizers whose parameters are DTensors, on other numbers of ranks."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from group_tools import assert_same, message_of
from ranks import case, shared_folder
from shampoo_tools import OPTIONS, parameters, shampoo, train, values
from sharded_shampoo_cases import (
    MODELS,
    full_gradients,
    fully_sharded,
    layouts,
    loss_of,
    shards,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard


@case(4)
def state_dicts_on_other_meshes(ranks: int) -> None:
    rank = dist.get_rank()
    options = OPTIONS["all_buffers"]
    expected_params = parameters()
    expected = shampoo(expected_params, **options)
    train(expected, expected_params, range(4))
    final = values(expected, expected_params)
    meshes = {n: DeviceMesh("cpu", [*range(n)]) for n in (1, 2, 3, 4)}
    for before, after in ((1, 2), (2, 1), (2, 3), (3, 2), (4, 2), (0, 3), (3, 0)):  # 0: one process
        saved: list[Any] = [None, None]
        params: list[Any] = parameters()
        if rank < max(before, 1):
            if before:
                params = shards(params, meshes[before], [Shard(0)])
            optimizer = shampoo(params, **options)
            train(optimizer, params, range(2))
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            full = [p.full_tensor() if before else p for p in params]
            saved = [buffer.getvalue(), [p.detach() for p in full]]
        dist.broadcast_object_list(saved, 0)
        params = [nn.Parameter(p.clone()) for p in saved[1]]
        if rank < max(after, 1):
            if after:
                params = shards(params, meshes[after], [Shard(0)])
            optimizer = shampoo(params, **options)
            optimizer.load_state_dict(torch.load(io.BytesIO(saved[0])))
            assert "statistics.0" in optimizer.state_dict()["state"][0]
            train(optimizer, params, range(2, 4))
            assert_same(values(optimizer, params), final)


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model, seed, 0).backward()
    optimizer.step()


@case(4)
def distributed_checkpoints_of_shards(ranks: int) -> None:
    folder = shared_folder()
    for name in ("fully_shard", "hybrid", "fully_shard and tensor parallel"):
        for flatten in (False, True) if name == "hybrid" else (False,):
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            model = MODELS[name](ranks)
            optimizer = shampoo(model.parameters(), **OPTIONS["all_buffers"])
            for i in range(2):
                step(model, optimizer, i)
            checkpoint = folder / f"dcp {name} {flatten}"
            state = get_optimizer_state_dict(model, optimizer, options=options)
            dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=checkpoint)

            other_model = MODELS[name](ranks)
            start = [p.to_local().clone() for p in other_model.parameters()]
            other = shampoo(other_model.parameters(), **OPTIONS["all_buffers"])
            state = {
                "model": other_model.state_dict(),
                # Takes a step with gradients of zero and a learning rate of zero.
                "optimizer": get_optimizer_state_dict(other_model, other, options=options),
            }
            for p, local in zip(other_model.parameters(), start, strict=True):
                assert torch.equal(p.to_local(), local)
            dcp.load(state, checkpoint_id=checkpoint)
            other_model.load_state_dict(state["model"])
            set_optimizer_state_dict(other_model, other, state["optimizer"], options=options)
            for each, of in ((model, optimizer), (other_model, other)):
                step(each, of, 2)
            assert_same(
                values(other, [*other_model.parameters()]),
                values(optimizer, [*model.parameters()]),
            )


def elements(states: dict[int, Any]) -> int:
    """Of the state that a rank saves, but for counts, which all have."""
    tensors = [t for state in states.values() for t in state.values() if t.dim()]
    return sum(getattr(t, "share", t).numel() for t in tensors)


@case(4)
def every_block_is_saved_by_its_owner(ranks: int) -> None:
    """Shares of the state, into one process and from one."""
    folder = shared_folder()
    for layout, options in (
        ("replicas of rows", OPTIONS["all_buffers"]),
        ("strided rows", OPTIONS["diagonal"]),
        ("rows of columns", OPTIONS["flattened"]),
        ("rows of rows", OPTIONS["as_given"]),
    ):
        mesh, placements = layouts(ranks)[layout]
        params = shards(parameters(), mesh, placements)
        optimizer = shampoo(params, dist.group.WORLD, **options)
        train(optimizer, params, range(2))
        before = values(optimizer, params)
        with optimizer.sharding():
            state = optimizer.state_dict()["state"]
        whole = optimizer.state_dict()["state"]
        count = torch.tensor(elements(state))
        dist.all_reduce(count)
        assert count == elements(whole), layout
        dcp.async_save({"state": state}, checkpoint_id=folder / layout).result()
        fresh = {i: {k: torch.zeros_like(t) for k, t in s.items()} for i, s in whole.items()}
        dcp.load({"state": fresh}, checkpoint_id=folder / layout, no_dist=True)
        for i, saved in whole.items():
            assert_same(fresh[i], saved)
        dcp.save({"state": whole}, checkpoint_id=folder / f"{layout} whole")
        train(optimizer, params, range(2, 4))
        with optimizer.sharding():
            own = optimizer.state_dict()
        dcp.load({"state": own["state"]}, checkpoint_id=folder / f"{layout} whole")
        optimizer.load_state_dict(own)
        at_once = values(optimizer, params)
        assert_same(
            {k: v for k, v in at_once.items() if " of " in k},
            {k: v for k, v in before.items() if " of " in k},
        )
        train(optimizer, params, range(2, 3))


@case(4)
def shares_fit_their_own_optimizer_alone(ranks: int) -> None:
    params = shards(parameters(), layouts(ranks)["rows"][0], [Shard(0)])
    optimizer, other = shampoo(params), shampoo(params)
    train(optimizer, params, range(2))
    with optimizer.sharding():
        state = optimizer.state_dict()
    assert "whole tensors" in message_of(lambda: state["state"][0]["statistics.0"] + 1)[1]
    assert "for torch.save call" in message_of(lambda: torch.save(state, io.BytesIO()))[1]
    before = values(optimizer, params)
    kind, message = message_of(lambda: other.load_state_dict(state))
    assert kind == "ValueError"
    assert "load into a state dict that this optimizer has made" in message
    for share in state["state"][0].values():
        if share.is_floating_point() and getattr(share, "share", share).numel():
            getattr(share, "share", share).fill_(float("nan"))
    kind, message = message_of(lambda: optimizer.load_state_dict(state))
    assert "has entries that are not finite" in message
    assert_same(values(optimizer, params), before)


@case(4)
def full_state_dicts_on_one_rank(ranks: int) -> None:
    """Saved by rank 0 alone, loaded and broadcast from there."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = fully_sharded(ranks)
    optimizer = shampoo(model.parameters(), betas=(0.9, 0.9))
    for i in range(2):
        step(model, optimizer, i)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert bool(state) == (dist.get_rank() == 0)
    weights = [p.to_local().clone() for p in model.parameters()]
    other_model = fully_sharded(ranks)
    other = shampoo(other_model.parameters(), betas=(0.9, 0.9))
    set_optimizer_state_dict(
        other_model,
        other,
        state,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    with torch.no_grad():
        for p, local in zip(other_model.parameters(), weights, strict=True):
            p.to_local().copy_(local)
    for each, of in ((model, optimizer), (other_model, other)):
        step(each, of, 2)
    assert_same(
        values(other, [*other_model.parameters()]), values(optimizer, [*model.parameters()])
    )


@case(4)
def one_process_takes_over(ranks: int) -> None:
    """A checkpoint of fully_shard, loaded by one process without torch.distributed.checkpoint."""
    model = fully_sharded(ranks)
    optimizer = shampoo(model.parameters(), betas=(0.9, 0.9))
    for i in range(2):
        step(model, optimizer, i)
    whole = [nn.Parameter(p.full_tensor()) for p in model.parameters()]
    alone = shampoo(whole, betas=(0.9, 0.9))
    alone.load_state_dict(optimizer.state_dict())
    step(model, optimizer, 2)
    for p, grad in zip(whole, full_gradients(model), strict=True):
        p.grad = grad
    alone.step()
    assert_same(values(optimizer, [*model.parameters()]), values(alone, whole))
