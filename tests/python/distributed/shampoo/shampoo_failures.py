"""Processes that share the steps of Shampoo fail and warn together."""

from __future__ import annotations

import pickle
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from group_tools import (
    assert_raised_on_all,
    assert_same,
    assert_same_on_all_ranks,
    is_last,
    message_of,
    out_of_memory_in,
    replaced_operator,
    world,
)
from ranks import case, listed
from shampoo_tools import parameters, set_gradients, shampoo, train, values


@case(2, 3)
def all_ranks_skip_and_raise_together(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo([(f"p{i}", p) for i, p in enumerate(params)], world())
    train(optimizer, params, range(2))
    before = values(optimizer, params)
    for attempt in range(3):
        set_gradients(params, 2)
        if is_last():  # one of its own blocks is among them
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


@case(3)
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


@case(3)
def an_error_on_one_rank_is_one_on_all(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(2))
    before = values(optimizer, params)
    last = is_last()

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
        assert_raised_on_all(message_of(optimizer.step), text)
        optimizer.param_groups[0].update(eps=1e-4, capturable=False)
        assert_same(values(optimizer, params), before)
    train(optimizer, params, range(2, 3))
    assert_same_on_all_ranks(params)


@case(3)
def gradients_that_one_rank_cannot_unscale(ranks: int) -> None:
    params = parameters(torch.float16)
    optimizer = shampoo(params, world())
    set_gradients(params, 0)
    if is_last():
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    assert_raised_on_all(message_of(optimizer.step), "gradients in float16 would underflow")
    train(optimizer, params, range(2))
    assert_same_on_all_ranks(params)


@case(3)
def a_failure_that_one_rank_reports_before_its_step(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(1))
    before = values(optimizer, params)
    set_gradients(params, 1)
    earlier = mock.patch.object(optimizer, "_raise_failures", side_effect=RuntimeError("earlier"))
    with earlier if is_last() else nullcontext():
        kind, message = message_of(optimizer.step)
    assert kind == "RuntimeError"
    text = f"rank {ranks - 1} of the process group raised an error in step()"
    assert ("earlier" if is_last() else text) in message
    assert_same(values(optimizer, params), before)


@case(3)
def a_rank_steps_while_others_gather_the_state(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(1))
    set_gradients(params, 1)
    with optimizer.consolidating():
        kind, message = message_of(optimizer.step if is_last() else optimizer.state_dict)
    assert kind == "RuntimeError"
    calls = f"rank 0 of the process group has called state_dict() and rank {ranks - 1} step()"
    assert calls in message
    train(optimizer, params, range(1, 3))
    assert_same_on_all_ranks(params)


@case(3)
def a_copy_without_its_group_is_refused(ranks: int) -> None:
    group = dist.new_group(list(range(ranks)))
    params = parameters()
    optimizer = shampoo(params, group)
    saved = pickle.dumps(optimizer)
    dist.barrier(group)  # otherwise one rank may leave while another still connects to it
    dist.destroy_process_group(group)
    kind, message = message_of(lambda: pickle.loads(saved))
    assert kind == "ValueError"
    assert "of this copy of an optimizer does not exist in this process" in message


@case(3)
def parameters_in_another_order_on_one_rank(ranks: int) -> None:
    params = parameters(shapes=[(20, 20), (20, 20), (5,)])
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    if dist.get_rank() == 1:
        named[:2] = named[1::-1]
    before = [p.detach().clone() for p in params]
    set_gradients(params, 0)
    kind, message = message_of(shampoo(named, world()).step)
    assert kind == "RuntimeError"
    assert "rank 1 of the process group differs from rank 0" in message
    assert all(torch.equal(p, start) for p, start in zip(params, before, strict=True))


@case(3)
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
        others = listed([r for r in range(ranks) if r != 1])
        assert f"'p3' of group 0 (shape [33, 17]) has a gradient on {others} of" in message
        assert "none on rank 1" in message
        if before:
            assert_same({k: v for k, v in values(optimizer, params).items() if k in before}, before)
        train(optimizer, params, range(step, step + 1))


@case(3)
def other_options_on_one_rank(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(1))
    before = values(optimizer, params)
    last = is_last()
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
            assert (
                f"rank {ranks - 1} of the process group differs from rank 0 in parameters, options"
                in message
            )
        optimizer.param_groups[0][name] = right
        assert_same(values(optimizer, params), before)


@case(3)
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


@case(3)
def an_error_during_the_work_of_one_rank_is_one_on_all(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world(), update_freq=1)
    train(optimizer, params, range(2))
    before = [p.detach().clone() for p in params]
    set_gradients(params, 2)
    last = is_last()
    with out_of_memory_in("baddbmm_") if last else nullcontext():
        kind, message = message_of(optimizer.step)
    if last:
        assert "none left for baddbmm_" in message, (kind, message)
    else:
        assert kind == "RuntimeError"
        assert (
            f"rank {ranks - 1} of the process group raised an error during its work" in message
        ), message
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def conversions_out_of_memory(
    tensor: Any, *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    """Of the directions that a rank has received."""
    if isinstance(tensor, float):
        return torch.full((), tensor, dtype=dtype or torch.float64)
    if tensor.dtype == torch.bfloat16:
        raise MemoryError("none left for directions")
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype).copy_(tensor)


@case(3)
def an_error_while_directions_are_applied_is_heard_of_in_the_next_step(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world(), comm_dtype=torch.bfloat16)
    train(optimizer, params, range(2))
    first, last = dist.get_rank() == 0, is_last()
    for step in (2, 3, 4):
        set_gradients(params, step)
        if step == 3 and first:
            params[0].grad = params[0].grad.to_sparse()
        fails = replaced_operator("_to_copy", conversions_out_of_memory)
        with fails if last and step == 2 else nullcontext():
            kind, message = message_of(optimizer.step)
        if step == 2:
            assert ("none left for directions" in message) == last, (kind, message)
        elif step == 3:  # the error of a rank that cannot take the step comes first
            text = "sparse" if first else "rank 0 of the process group raised an error in step()"
            assert text in message, message
        else:
            assert kind == "RuntimeError"
            assert f"rank {ranks - 1} of the process group raised" in message, message
            assert "The parameters of the ranks differ now" in message, message


@case(3)
def wrong_arguments(ranks: int) -> None:
    params = parameters()
    for wrong, text in (
        ({"comm_dtype": torch.int8}, "comm_dtype must be one of torch.float32"),
        ({"bucket_bytes": 0}, "bucket_bytes must be an integer from 1 to 2**63 - 1, got 0"),
        ({"bucket_bytes": 1.5}, "bucket_bytes must be"),
        ({"process_group": "WORLD"}, "process_group must be a torch.distributed.ProcessGroup"),
    ):
        import torchium

        kind, message = message_of(lambda wrong=wrong: torchium.Shampoo(params, **wrong))
        assert kind == "ValueError"
        assert text in message


@case(3)
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
