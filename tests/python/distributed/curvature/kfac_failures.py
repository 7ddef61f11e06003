"""Processes that share the steps of K-FAC fail and resume together."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from group_tools import (
    assert_one_rank_takes_the_state,
    assert_raised_on_all,
    assert_same,
    assert_same_on_all_ranks,
    copies_of,
    is_last,
    message_of,
    message_of_step,
    out_of_memory_in,
    whole_state,
    world,
)
from kfac_tools import (
    FRACTIONS,
    Batch,
    assert_close,
    backward,
    kfac,
    network,
    own_part,
    shared,
    state_of,
    step_alone,
    step_shared,
    trained,
)
from ranks import case, device, listed
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@case(3)
def samples_of_one_rank_are_not_finite(ranks: int) -> None:
    for fraction in FRACTIONS:
        model, optimizer = shared(grad_worker_fraction=fraction, steps=range(2), TCov=1, TInv=1)
        parallel = DistributedDataParallel(model)
        before = state_of(model, optimizer)
        for attempt in range(3):
            optimizer.zero_grad()
            own = Batch(2).of(own_part(12, ranks))
            if is_last():
                own.images[0, 0, 0, 0] = float("nan")
            own.loss(parallel)[1].backward()
            kind, message = message_of_step(optimizer)
            assert (kind == "RuntimeError") == (attempt == 2), message
        assert "3 steps in a row" in message
        assert_same(state_of(model, optimizer), before)
        step_shared(model, optimizer, Batch(2))
        assert_same_on_all_ranks([*model.parameters()])


@case(3)
def factors_of_one_rank_are_too_large(ranks: int) -> None:
    """Finite gradients, but the squares of inputs overflow."""
    model, optimizer = shared(steps=range(2), TCov=1, grad_worker_fraction=0.01)
    before = state_of(model, optimizer)

    def prepare(own: Batch) -> None:
        if is_last():
            own.images[0] *= 1e200

    optimizer.zero_grad()
    backward(model, 2, prepare)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert_same(state_of(model, optimizer), before)


@case(3)
def a_scaler_of_one_rank_found_inf(ranks: int) -> None:
    model, optimizer = shared(steps=range(2), grad_worker_fraction=0.01)
    before = state_of(model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        backward(model, 2)
        optimizer.found_inf = torch.tensor([float(is_last())], device=device())
        optimizer.grad_scale = torch.tensor(1.0, device=device())
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale
    assert_same(state_of(model, optimizer), before)


@case(3)
def an_error_of_one_rank_is_one_of_all(ranks: int) -> None:
    model, optimizer = shared(steps=range(2), grad_worker_fraction=0.01)
    before = state_of(model, optimizer)

    def sparse() -> None:
        model.out.weight.grad = torch.ones_like(model.out.weight).to_sparse()

    def wrong_option() -> None:
        optimizer.param_groups[0]["eps"] = -1.0

    for spoil, text in ((sparse, "layout"), (wrong_option, "eps must be")):
        optimizer.zero_grad()
        backward(model, 2)
        if is_last():
            spoil()
        assert_raised_on_all(message_of(optimizer.step), text)
        optimizer.param_groups[0]["eps"] = 1e-8
        assert_same(state_of(model, optimizer), before)
    step_shared(model, optimizer, Batch(2))
    assert_same_on_all_ranks([*model.parameters()])


@case(3, cuda=False)  # other ranks raise in the next step there
def an_error_during_the_work_of_one_rank_raises_on_all(ranks: int) -> None:
    """With inverses, or with directions."""
    for operator in ("linalg_cholesky_ex", "bmm"):
        for fraction in FRACTIONS:
            model, optimizer = shared(
                steps=range(2), TInv=1, solver="cholesky", grad_worker_fraction=fraction
            )
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            backward(model, 2)
            with out_of_memory_in(operator) if is_last() else nullcontext():
                kind, message = message_of(optimizer.step)
            if is_last():
                assert f"none left for {operator}" in message, (kind, message)
            else:
                assert kind == "RuntimeError"
                text = f"rank {ranks - 1} of the process group raised an error during its work"
                assert text in message
            assert all(map(torch.equal, model.parameters(), before))


@case(3, cuda=False)  # the host does not wait for the gradients there
def gradients_of_one_rank_are_not_finite(ranks: int) -> None:
    for fraction in FRACTIONS:
        model, optimizer = shared(steps=range(2), grad_worker_fraction=fraction)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        backward(model, 2)
        if is_last():
            model.out.weight.grad.fill_(float("nan"))
        kind, message = message_of(optimizer.step)
        assert kind == "RuntimeError"
        assert "all ranks need the same gradients" in message
        assert all(map(torch.equal, model.parameters(), before))


@case(3)
def an_error_in_update_damping_is_one_on_all(ranks: int) -> None:
    _, optimizer = shared(steps=range(2), momentum=0.0, adaptive_damping=True)
    loss = torch.ones(2 if is_last() else 1)
    raised = message_of(lambda: optimizer.update_damping(loss, 0.5))
    assert_raised_on_all(raised, "loss_before must be one number", "update_damping()")
    assert optimizer.param_groups[0]["damping"] == 0.01
    optimizer.update_damping(1.0, 0.5)


@case(3)
def a_rank_steps_while_others_update_the_damping(ranks: int) -> None:
    model, optimizer = shared(steps=range(2), momentum=0.0, adaptive_damping=True)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    backward(model, 2)
    call = optimizer.step if is_last() else lambda: optimizer.update_damping(1.0, 0.5)
    kind, message = message_of(call)
    assert kind == "RuntimeError"
    calls = f"rank 0 of the process group has called update_damping() and rank {ranks - 1} step()"
    assert calls in message
    assert all(map(torch.equal, model.parameters(), before))


@case(3)
def layers_in_another_order_on_one_rank(ranks: int) -> None:
    """Of one shape: nothing but the names of their parameters tells them apart."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device())
    named = [*model.named_parameters()]
    optimizer = kfac(named[2:] + named[:2] if is_last() else named, world())
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 4, device=device())).square().mean().backward()
    kind, message = message_of(optimizer.step)
    assert kind == "RuntimeError"
    assert f"rank {ranks - 1} of the process group differs from rank 0" in message
    assert all(map(torch.equal, model.parameters(), before))


@case(3)
def a_layer_runs_on_one_rank_alone(ranks: int) -> None:
    """At first, when no rank has factors, and later."""
    for first in (0, 2):
        model = network()
        optimizer = kfac(model, world(), grad_worker_fraction=0.01)
        for step in range(first):
            step_shared(model, optimizer, Batch(step))
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        batch = Batch(first)
        if is_last():
            batch.loss(model)[1].backward()
        else:
            model.hidden(model.features(batch.images)).square().mean().backward()
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        kind, message = message_of(optimizer.step)
        assert kind == "RuntimeError", message
        assert f"has captured samples on rank {ranks - 1} of the process group" in message
        assert f"none on {listed([*range(ranks - 1)])}; its layer must run" in message
        assert "weight" in message, message
        assert all(map(torch.equal, model.parameters(), before))
        for step in range(first, first + 4):
            step_shared(model, optimizer, Batch(step))
        assert_same_on_all_ranks([*model.parameters()])


@case(3)
def other_options_of_one_rank(ranks: int) -> None:
    model = network()
    optimizer = kfac(model, world(), grad_worker_fraction=1.0 if is_last() else 0.01)
    backward(model, 0)
    kind, message = message_of(optimizer.step)
    assert kind == "RuntimeError"
    assert (
        "of the process group differs from rank 0 in parameters, options or learning rates"
        in message
    )
    model, optimizer = shared(steps=range(1))
    for name, wrong in (("lr", 0.5), ("damping", 0.5), ("TInv", 4)):
        right = optimizer.param_groups[0][name]
        if is_last():
            optimizer.param_groups[0][name] = wrong
        optimizer.zero_grad()
        backward(model, 1)
        kind, message = message_of(optimizer.step)
        assert kind == "RuntimeError"
        assert f"rank {ranks - 1} of the process group differs from rank 0" in message
        optimizer.param_groups[0][name] = right


@case(3)
def a_checkpoint_on_one_rank_alone(ranks: int) -> None:
    model, optimizer = shared(steps=range(3))
    state = optimizer.state_dict()
    step_shared(model, optimizer, Batch(3))
    if is_last():
        optimizer.load_state_dict(state)
    optimizer.zero_grad()
    backward(model, 4)
    kind, message = message_of(optimizer.step)
    assert kind == "RuntimeError"
    assert f"has different state, on rank {ranks - 1} of" in message or "captured" in message


@case(3)
def failed_roots_raise_on_all_ranks(ranks: int) -> None:
    for fraction in FRACTIONS:
        model, optimizer = shared(steps=range(1), TCov=100, TInv=1, grad_worker_fraction=fraction)
        optimizer.state[model.out.weight]["A"].fill_(float("inf"))
        before = state_of(model, optimizer)
        for attempt in range(3):
            optimizer.zero_grad()
            backward(model, attempt)
            kind, message = message_of_step(optimizer)
            assert (kind == "RuntimeError") == (attempt == 2), message
        assert "out.weight" in message
        after = state_of(model, optimizer)
        for key in ("A_inverse of out.weight", "G_inverse of out.weight"):
            assert torch.equal(after[key], before[key])
        assert after["root_failures of out.weight"].tolist() == [3, 0]
        assert_same_on_all_ranks([*model.parameters()])


@case(3)
def inverses_that_one_rank_has_lost(ranks: int) -> None:
    """All ranks make them again together."""
    states = []
    for loses in (False, True):
        model, optimizer = shared(steps=range(2), TInv=100)
        if loses and is_last():
            for key in ("A_inverse", "G_inverse"):
                del optimizer.state[model.out.weight][key]
        for step in range(2, 4):
            step_shared(model, optimizer, Batch(step))
        assert_same_on_all_ranks([*model.parameters()])
        states.append(state_of(model, optimizer))
    assert states[0].keys() == states[1].keys()


@case(3)
def checkpoints_on_other_numbers_of_ranks(ranks: int) -> None:
    rank = dist.get_rank()
    groups = {1: dist.new_group([0]), 2: dist.new_group([0, 1]), ranks: world()}
    for options in ({}, {"damping_split": "exact"}, {"solver": "inverse_free"}):
        reference, optimizer = trained(steps=range(5), **options)
        expected = state_of(reference, optimizer)
        for step in range(5, 8):
            step_alone(reference, optimizer, Batch(step))
        final = {name: p.detach() for name, p in reference.named_parameters()}
        for before, after in ((0, ranks), (ranks, 0), (ranks, 2), (2, ranks)):
            saved: list[Any] = [None]
            if rank < max(before, 1):
                model, optimizer = _on(groups.get(before), range(5), **options)
                buffer = io.BytesIO()
                torch.save([whole_state(optimizer), model.state_dict()], buffer)
                saved = [buffer.getvalue()]
            dist.broadcast_object_list(saved, 0)
            state, weights = torch.load(io.BytesIO(saved[0]))
            if rank < max(after, 1):
                model = network()
                model.load_state_dict(weights)
                optimizer = kfac(model, groups.get(after), grad_worker_fraction=0.01, **options)
                optimizer.load_state_dict(state)
                assert_close(state_of(model, optimizer), expected)
                _take(model, optimizer, groups.get(after), range(5, 8))
                own = {name: p.detach() for name, p in model.named_parameters()}
                assert_close(own, final)


def _on(group: Any, steps: range, **options: Any) -> tuple[nn.Module, Any]:
    model = network()
    optimizer = kfac(model, group, grad_worker_fraction=0.01, **options)
    _take(model, optimizer, group, steps)
    return model, optimizer


def _take(model: nn.Module, optimizer: Any, group: Any, steps: range) -> None:
    for step in steps:
        batch = Batch(step)
        if group is None:
            step_alone(model, optimizer, batch)
            continue
        count, rank = dist.get_world_size(group), dist.get_rank(group)
        share = len(batch) // count
        own = batch.of(slice(rank * share, (rank + 1) * share))
        optimizer.zero_grad()
        own.loss(model)[1].backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad.div_(count)
        optimizer.step()


@case(3)
def copies_and_pickles_go_on(ranks: int) -> None:
    for fraction in FRACTIONS:
        model, optimizer = shared(steps=range(3), grad_worker_fraction=fraction)
        copies = copies_of((model, optimizer))
        for each in ((model, optimizer), *copies):
            for step in range(3, 6):
                step_shared(*each, Batch(step))
        expected = state_of(model, optimizer)
        for other in copies:
            assert_same(state_of(*other), expected)


@case(3)
def the_whole_state_of_copies(ranks: int) -> None:
    """Before their first step, when they have no owners yet."""
    for fraction in (0.5, 0.01):
        model, optimizer = shared(steps=range(3), grad_worker_fraction=fraction)
        expected = state_of(model, optimizer)
        for copied in copies_of((model, optimizer)):
            assert_same(state_of(*copied), expected)
            kind, message = message_of(copied[1].state_dict)
            assert kind == "RuntimeError"
            assert "with optimizer.consolidating()" in message


@case(3)
def inverses_are_gathered_by_all_ranks_or_none(ranks: int) -> None:
    model, optimizer = shared(steps=range(2), grad_worker_fraction=0.01)
    optimizer.zero_grad()
    backward(model, 2)
    with optimizer.consolidating():
        kind, message = message_of(optimizer.step if is_last() else optimizer.state_dict)
    assert kind == "RuntimeError"
    calls = f"rank 0 of the process group has called state_dict() and rank {ranks - 1} step()"
    assert calls in message
    lost = optimizer.state.pop(model.out.weight) if is_last() else None
    with optimizer.consolidating():
        kind, message = message_of(optimizer.state_dict)
    assert kind == "RuntimeError"
    assert f"has different state, on rank {ranks - 1} of the process group" in message
    if lost is not None:
        optimizer.state[model.out.weight] = lost
    step_shared(model, optimizer, Batch(2))
    assert_same_on_all_ranks([*model.parameters()])


@case(3)
def one_rank_takes_consolidated_inverses(ranks: int) -> None:
    _, optimizer = shared(steps=range(1), grad_worker_fraction=0.01)
    assert_one_rank_takes_the_state(optimizer)


@case(3)
def a_rank_alone_does_not_wait_for_inverses(ranks: int) -> None:
    _, optimizer = shared(steps=range(1), grad_worker_fraction=0.01)
    kind, message = message_of(optimizer.state_dict)
    assert kind == "RuntimeError"
    assert "with optimizer.consolidating()" in message
    _, optimizer = shared(steps=range(1))
    if dist.get_rank() == 0:
        assert any("A_inverse" in state for state in optimizer.state_dict()["state"].values())


@case(3)
def wrong_arguments(ranks: int) -> None:
    for wrong, text in (
        ({"process_group": "WORLD"}, "process_group must be a torch.distributed.ProcessGroup"),
        (
            {"grad_worker_fraction": 0},
            "grad_worker_fraction must be a number above 0 and at most 1",
        ),
        ({"grad_worker_fraction": 1.5}, "at most 1, got 1.5"),
        ({"grad_worker_fraction": "all"}, "got 'all'"),
        (
            {"grad_worker_fraction": 0.5, "ekfac": True, "damping_split": "exact"},
            "ekfac=True needs the eigenvectors of all layers on all ranks",
        ),
    ):
        for name in ("KFAC", "KFACPreconditioner"):
            options = {"group": world(), **wrong}
            options["group"] = options.pop("process_group", options["group"])
            kind, message = message_of(lambda o=options, n=name: kfac(network(), name=n, **o))
            assert kind == "ValueError", message
            assert text in message
    model, optimizer = shared(steps=range(1), grad_worker_fraction=0.01, damping_split="exact")
    optimizer.param_groups[0]["ekfac"] = True
    backward(model, 1)
    kind, message = message_of(optimizer.step)
    assert kind == "ValueError"
    assert "use grad_worker_fraction=1" in message
