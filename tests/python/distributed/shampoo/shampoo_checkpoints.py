"""Processes that share the steps of Shampoo save, resume and copy it together."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from group_tools import (
    assert_one_rank_takes_the_state,
    assert_raised_on_all,
    assert_same,
    assert_same_on_all_ranks,
    copies_of,
    flat,
    is_last,
    message_of,
    whole_state,
    world,
)
from ranks import case, shared_folder
from shampoo_tools import (
    OPTIONS,
    assert_copies_go_on,
    parameters,
    set_gradients,
    shampoo,
    train,
    values,
)
from sharded_shampoo_cases import line, shards
from torch import nn
from torch.distributed.tensor import Shard


@case(3)
def checkpoints_on_other_numbers_of_ranks(ranks: int) -> None:
    rank = dist.get_rank()
    groups = {
        1: dist.new_group([0]),
        2: dist.new_group([0, 1]),
        3: dist.new_group([0, 1, 2]),
    }
    options = OPTIONS["all_buffers"]
    expected_params = parameters()
    expected = shampoo(expected_params, **options)
    train(expected, expected_params, range(5))
    final = values(expected, expected_params)
    for before, after in ((1, 2), (2, 1), (2, 3), (3, 2), (0, 3), (3, 0)):  # 0: no group
        params = parameters()
        saved: list[Any] = [None, None]
        if rank < max(before, 1):
            optimizer = shampoo(params, groups.get(before), **options)
            train(optimizer, params, range(3))
            buffer = io.BytesIO()
            torch.save(whole_state(optimizer), buffer)
            saved = [buffer.getvalue(), [p.detach() for p in params]]
        dist.broadcast_object_list(saved, 0)
        params = [nn.Parameter(p.clone()) for p in saved[1]]
        if rank < max(after, 1):
            optimizer = shampoo(params, groups.get(after), **options)
            optimizer.load_state_dict(torch.load(io.BytesIO(saved[0])))
            at_once = values(optimizer, params)
            train(optimizer, params, range(3, 5))
            assert_same(values(optimizer, params), final)
            assert "statistics.0 of 0" in at_once


@case(2)
def options_that_change_right_after_a_load_change_as_in_the_run(ranks: int) -> None:
    """A second moment of another kind begins afresh in both."""
    for is_sharded in (False, True):
        params: list[Any] = parameters()
        if is_sharded:
            params = shards(params, line(ranks), [Shard(0)])
        optimizer = shampoo(params, None if is_sharded else world(), grafting="adam")
        train(optimizer, params, range(3))
        resumed_params = copy.deepcopy(params)
        resumed = shampoo(resumed_params, None if is_sharded else world(), grafting="adam")
        resumed.load_state_dict(whole_state(optimizer))
        pairs = [(resumed_params, resumed), *copies_of((params, optimizer))]
        optimizer.param_groups[0]["grafting"] = "adagrad"
        train(optimizer, params, range(3, 5))
        for other_params, other in pairs:
            other.param_groups[0]["grafting"] = "adagrad"
            train(other, other_params, range(3, 5))
            assert_same(values(other, other_params), values(optimizer, params))


@case(3)
def copies_and_pickles_go_on(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world(), **OPTIONS["all_buffers"])
    train(optimizer, params, range(3))
    assert_copies_go_on(optimizer, params, range(3, 5))


@case(3)
def copies_keep_owners_that_were_chosen_late(ranks: int) -> None:
    """Parameters that were frozen at first have owners chosen after those of the others."""
    params = parameters()
    for p in params[::2]:
        p.requires_grad_(False)
    optimizer = shampoo(params, world(), **OPTIONS["all_buffers"])
    for step in range(3):
        set_gradients(params, step)
        for p in params[::2]:
            p.grad = None
        optimizer.step()
    for p in params[::2]:
        p.requires_grad_(True)
    assert_copies_go_on(optimizer, params, range(3, 5))
    copied = copy.deepcopy(copy.deepcopy((params, optimizer)))
    assert_same(values(copied[1], copied[0]), values(optimizer, params))  # before a step
    train(copied[1], copied[0], range(5, 7))
    train(optimizer, params, range(5, 7))
    assert_same(values(copied[1], copied[0]), values(optimizer, params))


@case(3)
def state_that_only_some_ranks_need(ranks: int) -> None:
    """A state dict after an option has changed while a parameter had no gradient."""
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(1))
    optimizer.param_groups[0]["momentum"] = 0.9
    set_gradients(params, 1)
    params[1].grad = None  # of one block, which one rank owns
    optimizer.step()
    state = whole_state(optimizer)["state"]
    assert "momentum_buffer" in state[0]
    assert "momentum_buffer" not in state[1]


@case(3)
def distributed_checkpoints(ranks: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    folder = shared_folder() / "shampoo"

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 7))

    for way in ("consolidating", "sharding"):
        model = network()
        optimizer = shampoo(model.parameters(), world(), betas=(0.9, 0.9))
        train(optimizer, [*model.parameters()], range(3))
        with getattr(optimizer, way)():
            saved = get_optimizer_state_dict(model, optimizer)
            dcp.save({"optimizer": saved}, checkpoint_id=folder / way)
        other_model = network()
        other_model.load_state_dict(model.state_dict())
        other = shampoo(other_model.parameters(), world(), betas=(0.9, 0.9))
        with getattr(other, way)():
            state = get_optimizer_state_dict(other_model, other)  # a step with gradients of zero
        assert_same(dict(other_model.state_dict()), dict(model.state_dict()))
        dcp.load({"optimizer": state}, checkpoint_id=folder / way)
        with getattr(other, way)():
            set_optimizer_state_dict(other_model, other, state)
        params, others = [*model.parameters()], [*other_model.parameters()]
        assert {k: v for k, v in values(other, others).items() if "step" in k}
        train(optimizer, params, range(3, 5))
        train(other, others, range(3, 5))
        assert_same(values(other, others), values(optimizer, params))


@case(3)
def distributed_checkpoints_keep_the_start_of_averages(ranks: int) -> None:
    """Also on ranks without blocks of a parameter."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    late = {"betas": (0.9, 0.9), "grafting": "adam"}
    for way in ("consolidating", "sharding"):
        model = nn.Linear(9, 7)
        params = [*model.parameters()]
        optimizer = shampoo(params, world(), grafting="sgd")
        train(optimizer, params, range(2))
        optimizer.param_groups[0].update(late)
        train(optimizer, params, range(2, 3))
        with getattr(optimizer, way)():
            state = get_optimizer_state_dict(model, optimizer)
            set_optimizer_state_dict(model, optimizer, state)
        folder = shared_folder() / f"starts {way}"
        dcp.save({"optimizer": state}, checkpoint_id=folder)
        other_model = copy.deepcopy(model)
        other_model.zero_grad()
        others = [*other_model.parameters()]
        other = shampoo(others, world(), **late)
        with getattr(other, way)():
            state = get_optimizer_state_dict(other_model, other)
            dcp.load({"optimizer": state}, checkpoint_id=folder)
            set_optimizer_state_dict(other_model, other, state)
        assert_same(values(other, others), values(optimizer, params))
        train(optimizer, params, range(3, 5))
        train(other, others, range(3, 5))
        assert_same(values(other, others), values(optimizer, params))


@case(3)
def shares_hold_what_changed_options_no_longer_need(ranks: int) -> None:
    """The ranks without blocks of a parameter keep none of it."""
    params = parameters(shapes=[(9, 7), (5, 5), (6,)])
    optimizer = shampoo(params, world(), momentum=0.9, betas=(0.9, 0.9))
    train(optimizer, params, range(2))
    optimizer.param_groups[0].update(momentum=0.0, betas=(0.0, 0.9))
    set_gradients(params, 2)
    params[1].grad = None  # its average is kept
    optimizer.step()
    before = values(optimizer, params)
    with optimizer.sharding():
        state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert "exp_avg of 1" in before
    assert_same(values(optimizer, params), before)
    optimizer.param_groups[0]["betas"] = (0.9, 0.9)
    train(optimizer, params, range(3, 4))
    assert_same_on_all_ranks(params)
    starts = [whole_state(optimizer)["state"][i]["exp_avg_start"].item() for i in range(3)]
    assert starts == [3, 0, 3]  # the kept one goes on


@case(3)
def state_that_does_not_fit_changed_options_is_not_gathered(ranks: int) -> None:
    for before, after in (
        ({"preconditioner_1d": "full"}, {"preconditioner_1d": "diagonal"}),
        ({}, {"preconditioned": False}),
        ({"preconditioned": False}, {"preconditioned": True}),
        ({}, {"max_preconditioned_dim": 5}),
        ({}, {"block_size": 3}),
        ({"block_size": 3}, {"block_size": 16}),
    ):
        params = parameters(shapes=[(6,), (9, 7), ()])
        optimizer = shampoo(params, world(), **before)
        train(optimizer, params, range(1))
        expected = values(optimizer, params)
        own = {key: optimizer.param_groups[0][key] for key in after}
        optimizer.param_groups[0].update(after)
        _, copied = copy.deepcopy((params, optimizer))
        for block in (optimizer.consolidating, optimizer.sharding, copied.consolidating):
            with block():
                kind, message = message_of(block.__self__.state_dict)
            assert kind == "ValueError", (after, message)
            assert "was made for other blocks" in message, message
        optimizer.param_groups[0].update(own)
        assert_same(values(optimizer, params), expected)


@case(3)
def a_rank_alone_does_not_wait_for_a_state_dict(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    assert optimizer.state_dict()["state"] == {}
    train(optimizer, params, range(1))
    if dist.get_rank() == 0:
        kind, message = message_of(optimizer.state_dict)
        assert kind == "RuntimeError"
        assert "with optimizer.consolidating()" in message
    with optimizer.consolidating():
        state = optimizer.state_dict()
    alone = shampoo(parameters())
    alone.load_state_dict(state)
    assert alone.state_dict()["state"].keys() == state["state"].keys()


@case(3)
def one_rank_takes_a_consolidated_state(ranks: int) -> None:
    """As Lightning does, and as with ZeroRedundancyOptimizer."""
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(2))
    assert_one_rank_takes_the_state(optimizer)
    optimizer.consolidate_state_dict()
    train(optimizer, params, range(2, 3))
    kind, _ = message_of(optimizer.state_dict)
    assert kind == "RuntimeError"  # what was gathered is no longer the state
    saved = whole_state(optimizer)
    optimizer.consolidate_state_dict()
    optimizer.load_state_dict(saved)
    kind, _ = message_of(optimizer.state_dict)
    assert kind == "RuntimeError"
    optimizer.consolidate_state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    if dist.get_rank() == 0:
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    optimizer.consolidate_state_dict()
    with optimizer.sharding():  # in which all ranks call it
        optimizer.state_dict()
    assert_same(flat(whole_state(optimizer)), flat(whole_state(optimizer)))
    kind, message = message_of(lambda: optimizer.consolidate_state_dict(to=ranks))
    assert kind == "ValueError"
    assert f"to must be a rank of the process_group, in [0, {ranks}), got {ranks}" in message
    placed = shards(parameters(shapes=[(16, 8), (5,)]), line(ranks), [Shard(0)])
    sharded = shampoo(placed)
    train(sharded, placed, range(2))
    expected = flat(sharded.state_dict())
    sharded.consolidate_state_dict()
    if dist.get_rank() == 0:  # which would otherwise wait for the others
        assert_same(flat(sharded.state_dict()), expected)


@case(3)
def ranks_that_gather_different_states_raise(ranks: int) -> None:
    last = is_last()

    def state(block: str) -> Any:
        with getattr(optimizer, block)():
            return optimizer.state_dict()

    def another_group() -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    def another_option() -> None:
        optimizer.param_groups[0]["block_size"] = 8

    def lost_option() -> None:
        del optimizer.param_groups[0]["eps"]

    def loads() -> None:
        optimizer.load_state_dict(saved)

    def nothing() -> None:
        pass

    differs = f"rank {ranks - 1} of the process group differs from rank 0"
    failed = f"rank {ranks - 1} of the process group raised an error in state_dict()"
    whole = "is whole on some ranks of the process group and shared out on others"
    for change, text in (
        (another_group, differs),
        (another_option, "was made for other blocks" if last else failed),
        (lost_option, "eps" if last else failed),
        (loads, whole),
        (nothing, differs),
    ):
        for block in ("consolidating", "sharding"):
            params = parameters()
            optimizer = shampoo(params, world())
            train(optimizer, params, range(1))
            saved = whole_state(optimizer)
            own = block
            if last:
                change()
                if change is nothing:
                    own = "sharding" if block == "consolidating" else "consolidating"
            message = message_of(lambda own=own: state(own))[1]
            assert text in message, (change.__name__, block, message)


@case(3)
def state_of_another_shape_is_named(ranks: int) -> None:
    for key, wrong in (("roots.1", torch.zeros(99, 16, 16)), ("momentum_buffer", torch.zeros(99))):
        params = parameters()
        optimizer = shampoo(params, world(), **OPTIONS["all_buffers"])
        train(optimizer, params, range(1))
        before = [p.detach().clone() for p in params]
        if is_last():
            optimizer.state[params[0]][key] = wrong
        set_gradients(params, 1)
        raised = message_of(optimizer.step)
        text = f"'{key}' of parameter 0 of group 0 (shape [40, 24]) has shape [99"
        assert_raised_on_all(raised, text)
        assert (f"nor the share of rank {ranks - 1}" in raised[1]) == is_last()
        assert all(map(torch.equal, params, before))
