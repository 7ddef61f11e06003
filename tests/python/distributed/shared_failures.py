"""Processes that share the steps of Shampoo fail, resume and warn together."""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared_tools import (
    OPTIONS,
    assert_same,
    assert_same_on_all_ranks,
    case,
    message_of,
    parameters,
    set_gradients,
    shampoo,
    train,
    values,
    whole_state,
    world,
)
from torch import nn


@case
def all_ranks_skip_and_raise_together(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo([(f"p{i}", p) for i, p in enumerate(params)], world())
    train(optimizer, params, range(2))
    before = values(optimizer, params)
    for attempt in range(3):
        set_gradients(params, 2)
        if dist.get_rank() == ranks - 1:  # one of its own blocks is among them
            for p in params[3:]:
                p.grad.fill_(float("nan"))
        kind, message = message_of(optimizer.step)
        assert (kind == "RuntimeError") == (attempt == 2), message
    assert "3 steps in a row" in message
    assert "parameter 'p" in message
    texts: list[Any] = [None] * ranks
    dist.all_gather_object(texts, message)
    assert len(set(texts)) == 1, texts
    assert_same(values(optimizer, params), before)
    train(optimizer, params, range(2, 4))
    assert optimizer.state[params[0]]["step"] == 4


@case
def a_scaler_that_found_inf_on_one_rank(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(1))
    before = values(optimizer, params)
    for _ in range(4):
        set_gradients(params, 1)
        optimizer.found_inf = torch.tensor([float(dist.get_rank() == 0)])
        optimizer.step()
        del optimizer.found_inf
    assert_same(values(optimizer, params), before)


@case
def an_error_on_one_rank_is_one_on_all(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(2))
    before = values(optimizer, params)
    last = dist.get_rank() == ranks - 1

    def sparse() -> None:
        params[1].grad = torch.eye(16).to_sparse()

    def wrong_option() -> None:
        optimizer.param_groups[0]["eps"] = -1.0

    def capturable() -> None:
        optimizer.param_groups[0]["capturable"] = True

    for spoil, text in (
        (sparse, "layout"),
        (wrong_option, "eps must be"),
        (capturable, "capturable"),
    ):
        set_gradients(params, 2)
        if last:
            spoil()
        kind, message = message_of(optimizer.step)
        if last:
            assert kind == "ValueError"
            assert text in message
        else:
            assert kind == "RuntimeError"
            assert f"rank {ranks - 1} of the process group raised an error in step()" in message
        optimizer.param_groups[0].update(eps=1e-4, capturable=False)
        assert_same(values(optimizer, params), before)
    train(optimizer, params, range(2, 3))
    assert_same_on_all_ranks(params)


@case
def parameters_in_another_order_on_one_rank(ranks: int) -> None:
    params = parameters(shapes=[(20, 20), (20, 20), (5,)])
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    if dist.get_rank() == 1:
        named[:2] = named[1::-1]
    before = [p.detach().clone() for p in params]
    set_gradients(params, 0)
    kind, message = message_of(shampoo(named, world()).step)
    assert kind == "RuntimeError"
    assert "rank 1 of the process group has other parameters" in message
    assert all(torch.equal(p, start) for p, start in zip(params, before, strict=True))


@case
def gradients_of_other_parameters_on_one_rank(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo([(f"p{i}", p) for i, p in enumerate(params)], world())
    for step in range(3):
        before = values(optimizer, params)
        set_gradients(params, step)
        if dist.get_rank() == 1:
            params[3].grad = None
        kind, message = message_of(optimizer.step)
        assert kind == "RuntimeError"
        others = ", ".join(str(r) for r in range(ranks) if r != 1)
        assert f"'p3' of group 0 (shape [33, 17]) has a gradient on rank {others} of" in message
        assert "none on rank 1" in message
        if before:
            assert_same({k: v for k, v in values(optimizer, params).items() if k in before}, before)
        train(optimizer, params, range(step, step + 1))


@case
def other_options_on_one_rank(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(1))
    before = values(optimizer, params)
    last = dist.get_rank() == ranks - 1
    for name, wrong in (("lr", 0.5), ("eps", 0.5), ("block_size", 8)):
        right = optimizer.param_groups[0][name]
        if last:
            optimizer.param_groups[0][name] = wrong
        set_gradients(params, 1)
        kind, message = message_of(optimizer.step)
        if name == "block_size":  # the state does not fit on that rank
            assert "set block_size" in message if last else "raised an error" in message
        else:
            assert kind == "RuntimeError"
            assert f"rank {ranks - 1} of the process group has other parameters, options" in message
        optimizer.param_groups[0][name] = right
        assert_same(values(optimizer, params), before)


@case
def a_failed_root_raises_on_all_ranks(ranks: int) -> None:
    params = parameters(shapes=[(16, 16)] * 4)
    optimizer = shampoo(params, world(), max_root_failures=1, update_freq=1)
    train(optimizer, params, range(1))
    for p in params[:1]:
        for key in ("statistics.0", "statistics.1"):
            optimizer.state[p][key].fill_(float("inf"))  # on the rank that has it
    set_gradients(params, 1)
    optimizer.step()
    set_gradients(params, 2)
    kind, message = message_of(optimizer.step)
    assert kind == "RuntimeError"
    assert "parameter 0 of group 0" in message
    assert "failed 1 times in a row" in message or "failed" in message


@case
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


@case
def copies_and_pickles_go_on(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world(), **OPTIONS["all_buffers"])
    train(optimizer, params, range(3))
    copied = copy.deepcopy((params, optimizer))
    pickled = pickle.loads(pickle.dumps((params, optimizer)))
    train(optimizer, params, range(3, 5))
    for other_params, other in (copied, pickled):
        train(other, other_params, range(3, 5))
        assert_same(values(other, other_params), values(optimizer, params))


@case
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
    copied = copy.deepcopy((params, optimizer))
    pickled = pickle.loads(pickle.dumps((params, optimizer)))
    train(optimizer, params, range(3, 5))
    for other_params, other in (copied, pickled):
        train(other, other_params, range(3, 5))
        assert_same(values(other, other_params), values(optimizer, params))
    copied = copy.deepcopy(copy.deepcopy((params, optimizer)))
    assert_same(values(copied[1], copied[0]), values(optimizer, params))  # before a step
    train(copied[1], copied[0], range(5, 7))
    train(optimizer, params, range(5, 7))
    assert_same(values(copied[1], copied[0]), values(optimizer, params))


@case
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


@case
def distributed_checkpoints(ranks: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    folder = Path(os.environ["SHARED_STEPS_FOLDER"]) / f"dcp{ranks}"

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


@case
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


@contextmanager
def failing_products() -> Iterator[None]:
    """As if this rank were out of memory."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("none left for products")

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("baddbmm_", fail, "CPU")
    try:
        yield
    finally:
        library._destroy()


@case
def an_error_during_the_work_of_one_rank_is_one_on_all(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world(), update_freq=1)
    train(optimizer, params, range(2))
    before = [p.detach().clone() for p in params]
    set_gradients(params, 2)
    last = dist.get_rank() == ranks - 1
    with failing_products() if last else nullcontext():
        kind, message = message_of(optimizer.step)
    if last:
        assert "none left for products" in message, (kind, message)
    else:
        assert kind == "RuntimeError"
        assert (
            f"rank {ranks - 1} of the process group raised an error during its work" in message
        ), message
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


@contextmanager
def failing_conversions() -> Iterator[None]:
    """As if this rank were out of memory for the directions that it has received."""

    def convert(tensor: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        if isinstance(tensor, float):
            return torch.full((), tensor, dtype=dtype or torch.float64)
        if tensor.dtype == torch.bfloat16:
            raise MemoryError("none left for directions")
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype).copy_(tensor)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("_to_copy", convert, "CPU")
    try:
        yield
    finally:
        library._destroy()


@case
def an_error_while_directions_are_applied_is_heard_of_in_the_next_step(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world(), comm_dtype=torch.bfloat16)
    train(optimizer, params, range(2))
    last = dist.get_rank() == ranks - 1
    for step in (2, 3):
        set_gradients(params, step)
        with failing_conversions() if last and step == 2 else nullcontext():
            kind, message = message_of(optimizer.step)
        if step == 2:
            assert ("none left for directions" in message) == last, (kind, message)
        else:
            assert f"rank {ranks - 1} of the process group raised" in message, (kind, message)


@case
def wrong_arguments(ranks: int) -> None:
    params = parameters()
    for wrong, text in (
        ({"comm_dtype": torch.int8}, "comm_dtype must be one of torch.float32"),
        ({"bucket_bytes": 0}, "bucket_bytes must be an integer of at least 1, got 0"),
        ({"bucket_bytes": 1.5}, "bucket_bytes must be"),
        ({"process_group": "WORLD"}, "process_group must be a torch.distributed.ProcessGroup"),
    ):
        import torchium

        kind, message = message_of(lambda wrong=wrong: torchium.Shampoo(params, **wrong))
        assert kind == "ValueError"
        assert text in message


@case
def repeated_work_is_warned_of(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, params, range(3))
        params[1].grad = None
        optimizer.step()
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1, texts
    assert f"each of {ranks} processes repeats the whole step of Shampoo" in texts[0]
    assert "process_group=torch.distributed.group.WORLD" in texts[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(shampoo(params, world()), params, range(2))
