"""Processes that share the steps of NaturalGradient fail and resume together."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from captured_layers import loss_fn
from group_tools import (
    assert_raised_on_all,
    assert_same_on_all_ranks,
    copies_of,
    is_last,
    message_of,
)
from natural_gradient_tools import (
    SOLVERS,
    alone,
    assert_moved_alike,
    average_gradients,
    batches_of,
    flat,
    model_and_batch,
    natural_gradient,
    own,
    sizes_of,
    step,
    trained,
)
from ranks import case, device
from torch import Tensor, nn
from torch.amp import GradScaler


def train(optimizer: Any, model: nn.Module, steps: range) -> None:
    for seed in steps:
        step(optimizer, model, batches_of("mlp", sizes_of(dist.get_world_size()), seed)[own()])


def step_and_check(optimizer: Any, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Raises what a GPU reports after the step too."""
    step(optimizer, model, batch)
    optimizer.check_errors()


@case(3)
def samples_that_are_not_finite_on_one_rank(ranks: int) -> None:
    for solver in SOLVERS:
        model, (x, y) = model_and_batch("mlp")
        optimizer = natural_gradient(model, **SOLVERS[solver])
        train(optimizer, model, range(2))
        before = flat(model)
        for attempt in range(3):
            batch = (x * float("nan") if is_last() else x, y)
            kind, message = message_of(partial(step_and_check, optimizer, model, batch))
            assert (kind == "RuntimeError") == (attempt == 2), message
        assert "3 steps in a row" in message
        assert torch.equal(flat(model), before)
        train(optimizer, model, range(2, 3))
        assert not torch.equal(flat(model), before)
        assert_same_on_all_ranks(trained(model))


@case(3)
def rows_that_are_not_finite_on_one_rank(ranks: int) -> None:
    """The gradient is finite, but not the matrix."""
    for solver in SOLVERS:
        model, _ = model_and_batch("mlp")
        optimizer = natural_gradient([*model.parameters()], **SOLVERS[solver])
        before = flat(model)
        for attempt in range(3):
            rows = [p.new_ones(2, *p.shape) for p in model.parameters()]
            if is_last() and attempt < 2:
                rows[1][0, 0] = float("inf")
            optimizer.update_jacobian(rows, rows[0].new_ones(2))
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            assert torch.equal(flat(model), before) == (attempt < 2), solver
        assert_same_on_all_ranks(trained(model))


@case(3, cuda=False)  # the host does not wait for the gradients there
def gradients_and_scalers_that_differ(ranks: int) -> None:
    """Ranks that do not have the same gradients skip together all the same."""
    for solver in ("gram", "cg"):
        model, _ = model_and_batch("mlp")
        optimizer = natural_gradient(model, **SOLVERS[solver])
        train(optimizer, model, range(1))
        before = flat(model)

        def spoil(params: list[Tensor]) -> None:
            if is_last():
                params[0].grad.fill_(float("nan"))

        batch = batches_of("mlp", sizes_of(ranks), 1)[own()]
        step(optimizer, model, batch, spoil)
        assert torch.equal(flat(model), before)
        scaler = GradScaler(device().type, init_scale=4.0)
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(batch[0]), batch[1])).backward()
        average_gradients(model)
        spoil(trained(model))
        scaler.step(optimizer)
        assert torch.equal(flat(model), before)
        train(optimizer, model, range(2, 3))
        assert_same_on_all_ranks(trained(model))


@case(3, cuda=False)
def gradients_of_one_rank_that_are_never_finite_raise_on_all(ranks: int) -> None:
    model, _ = model_and_batch("mlp")
    optimizer = natural_gradient(model, update_freq=2)
    train(optimizer, model, range(1))
    before = flat(model)

    def spoil(params: list[Tensor]) -> None:
        if is_last():
            params[1].grad.fill_(float("nan"))

    batch = batches_of("mlp", sizes_of(ranks), 1)[own()]
    for attempt in range(3):
        message = message_of(lambda: step(optimizer, model, batch, spoil))[1]
        assert ("3 steps in a row" in message) == (attempt == 2), message
    assert torch.equal(flat(model), before)
    train(optimizer, model, range(1, 4))
    assert_same_on_all_ranks(trained(model))


@case(3)
def an_error_on_one_rank_is_one_on_all(ranks: int) -> None:
    model, _ = model_and_batch("mlp")
    optimizer = natural_gradient(model)
    train(optimizer, model, range(2))
    before = flat(model)

    def wrong_option() -> None:
        optimizer.param_groups[0]["damping"] = -1.0

    def sparse() -> None:
        model[0].weight.grad = torch.ones_like(model[0].weight).to_sparse()

    for spoil, text in ((wrong_option, "damping must be"), (sparse, "layout")):
        optimizer.zero_grad()
        x, y = batches_of("mlp", sizes_of(ranks), 2)[own()]
        loss_fn(model(x), y).backward()
        average_gradients(model)
        if is_last():
            spoil()
        assert_raised_on_all(message_of(optimizer.step), text)
        optimizer.param_groups[0]["damping"] = 1e-2
        assert torch.equal(flat(model), before)
    train(optimizer, model, range(2, 3))
    assert_same_on_all_ranks(trained(model))


@case(3)
def an_error_in_update_jacobian_is_one_on_all(ranks: int) -> None:
    model, _ = model_and_batch("mlp")
    optimizer = natural_gradient([*model.parameters()])
    rows = [p.new_ones(2, *p.shape) for p in model.parameters()]
    residuals = rows[0].new_ones(2)
    wrong: list[tuple[Any, Any]] = [(rows[:2], residuals), (rows, [1.0, 2.0])]
    for bad_rows, bad_residuals in wrong:
        given = (bad_rows, bad_residuals) if is_last() else (rows, residuals)
        raised = message_of(partial(optimizer.update_jacobian, *given))
        assert_raised_on_all(raised, "", "update_jacobian()")
        assert all(p.grad is None for p in model.parameters())


@case(3)
def an_error_in_update_damping_raises_on_all(ranks: int) -> None:
    model, _ = model_and_batch("mlp")
    optimizer = natural_gradient(model, momentum=0.0, adaptive_damping=True)
    train(optimizer, model, range(1))
    loss: Any = "low" if is_last() else 1.0
    raised = message_of(partial(optimizer.update_damping, loss, 0.5))
    assert_raised_on_all(raised, "loss_before must be a number", "update_damping()")
    optimizer.update_damping(1.0, 0.5)


@case(3)
def parameters_are_listed_in_another_order_on_one_rank(ranks: int) -> None:
    """Of one shape: nothing but their names tells them apart."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device())
    named = [*model.named_parameters()]
    optimizer = natural_gradient(named[2:] + named[:2] if is_last() else named)
    before = flat(model)
    model(torch.ones(2, 4, device=device())).square().mean().backward()
    kind, message = message_of(optimizer.step)
    assert kind == "RuntimeError"
    assert f"rank {ranks - 1} of the process group differs from rank 0" in message
    assert torch.equal(flat(model), before)


@case(3)
def other_options_or_samples_on_one_rank(ranks: int) -> None:
    model, _ = model_and_batch("mlp")
    optimizer = natural_gradient(model)
    train(optimizer, model, range(1))
    before = flat(model)
    for name, wrong in (("lr", 0.25), ("damping", 0.5), ("solver", "cg"), ("update_freq", 2)):
        right = optimizer.param_groups[0][name]
        if is_last():
            optimizer.param_groups[0][name] = wrong
        batch = batches_of("mlp", sizes_of(ranks), 1)[own()]
        kind, message = message_of(partial(step, optimizer, model, batch))
        assert kind == "RuntimeError"
        assert (
            f"rank {ranks - 1} of the process group differs from rank 0 in parameters, options"
            in message
        )
        optimizer.param_groups[0][name] = right
    x, y = batches_of("mlp", sizes_of(ranks), 1)[own()]
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    average_gradients(model)
    if is_last():
        gradients = [p.grad.clone() for p in trained(model)]
        optimizer.zero_grad()
        for p, gradient in zip(trained(model), gradients, strict=True):
            p.grad = gradient
    kind, message = message_of(optimizer.step)
    if is_last():
        assert "has captured no backward pass" in message
    else:
        assert f"rank {ranks - 1} of the process group raised an error in step()" in message
    assert torch.equal(flat(model), before)


@case(3)
def another_precision_on_one_rank(ranks: int) -> None:
    model, (x, y) = model_and_batch("mlp", dtype=torch.float32)
    optimizer = natural_gradient(model)
    before = flat(model)
    with torch.autocast(device().type, dtype=torch.bfloat16, enabled=is_last()):
        loss_fn(model(x), y).backward()
    average_gradients(model)
    kind, message = message_of(optimizer.step)
    assert kind == "RuntimeError"
    assert (
        f"rank {ranks - 1} of the process group has computed its gradients in a different"
        in message
    )
    assert torch.equal(flat(model), before)


@case(3)
def without_a_group_the_step_is_refused(ranks: int) -> None:
    import torchium

    model, (x, y) = model_and_batch("mlp")
    optimizer = torchium.NaturalGradient(model)
    loss_fn(model(x), y).backward()
    kind, message = message_of(optimizer.step)
    assert kind == "RuntimeError"
    assert "process_group" in message


@case(3)
def copies_and_own_checkpoints_go_on(ranks: int) -> None:
    """Between two matrices, with the batch that each rank keeps."""
    model, _ = model_and_batch("mlp")
    optimizer = natural_gradient(model, update_freq=4)
    train(optimizer, model, range(2))
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    loaded, _ = model_and_batch("mlp")
    loaded.load_state_dict(saved[0])
    resumed = natural_gradient(loaded, update_freq=4)
    resumed.load_state_dict(saved[1])
    others = [
        *copies_of((model, optimizer)),
        (loaded, resumed),
    ]
    train(optimizer, model, range(2, 6))
    for other, each in others:
        train(each, other, range(2, 6))
        assert torch.equal(flat(other), flat(model))
    assert_same_on_all_ranks(trained(model))


@case(3)
def the_checkpoint_of_one_rank_serves_all(ranks: int) -> None:
    """A rank without a batch of its own takes one in the next step."""
    sizes = sizes_of(ranks)
    model, _ = model_and_batch("mlp")
    optimizer = natural_gradient(model, update_freq=3, momentum=0.0)
    train(optimizer, model, range(2))
    saved: list[Any] = [optimizer.state_dict()]
    dist.broadcast_object_list(saved, 0)
    for group in (None, alone()):
        other = copy.deepcopy(model)
        resumed = natural_gradient(other, group, update_freq=3, momentum=0.0)
        resumed.load_state_dict(copy.deepcopy(saved[0]))
        start = flat(other)
        batches = batches_of("mlp", sizes, 2)
        if group is None:
            kept = batches_of("mlp", sizes, 0)[0]  # of rank 0, which has its own batch
            step(resumed, other, batches[own()])
            rows = rows_of(model_and_batch("mlp")[0], kept) + [
                r for batch in batches[1:] for r in rows_of(other_at(other, start), batch)
            ]
            assert resumed.report()["rows"] == sum(sizes)
            assert_same_on_all_ranks(trained(other))
            v = torch.cat([p.grad.flatten() for p in trained(other)])
            J = torch.stack(rows)
            F = J.mT @ J / len(J)
            d = torch.linalg.solve(F + 1e-2 * torch.eye(len(F)).to(F), v)
            torch.testing.assert_close(flat(other) - start, -0.5 * d, rtol=1e-6, atol=1e-9)
        else:
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            loss_fn(other(x), y).backward()
            resumed.step()
            assert resumed.report()["rows"] == sum(sizes)  # a batch of its own


def other_at(model: nn.Module, values: Tensor) -> nn.Module:
    """A copy of the model with these parameters."""
    other = copy.deepcopy(model)
    nn.utils.vector_to_parameters(values, trained(other))
    return other


def rows_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    from reference.per_sample import per_sample_gradients

    rows = per_sample_gradients(model, loss_fn, *batch)
    return [*torch.cat([r.flatten(1) for r in rows.values()], 1)]


@case(3)
def optimizers_follow_one_process_after_a_checkpoint(ranks: int) -> None:
    """A state without a kept batch is that of one process."""
    sizes = sizes_of(ranks, equal=True)
    model, _ = model_and_batch("mlp")
    optimizer = natural_gradient(model)
    for seed in range(2):
        step(optimizer, model, batches_of("mlp", sizes, seed)[own()])
    one = copy.deepcopy(model)
    expected = natural_gradient(one, alone())
    expected.load_state_dict(optimizer.state_dict())
    start = flat(model)
    batches = batches_of("mlp", sizes, 2)
    step(optimizer, model, batches[own()])
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss_fn(one(x), y).backward()
    expected.step()
    assert_moved_alike(model, one, start, 1e-9)


@case(3)
def a_checkpoint_that_one_rank_alone_loads(ranks: int) -> None:
    model, _ = model_and_batch("mlp")
    optimizer = natural_gradient(model)
    train(optimizer, model, range(2))
    saved = optimizer.state_dict()
    optimizer = natural_gradient(model)
    if is_last():
        optimizer.load_state_dict(saved)
    before = flat(model)
    kind, message = message_of(lambda: train(optimizer, model, range(2, 3)))
    assert kind == "RuntimeError"
    assert f"has different state, on rank {ranks - 1} of the process group" in message
    assert torch.equal(flat(model), before)
