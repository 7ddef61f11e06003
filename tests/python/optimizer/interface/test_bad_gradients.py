"""Sparse gradients raise; those that are not finite skip the step, and the third in a row raises."""

from __future__ import annotations

import math

import pytest
import torch
from optimizer_cases import (
    all_cases,
    assert_same,
    capturing_cases,
    computed_state,
    give_gradients,
    ignore_fallback,
    mlp,
    plain_cases,
    run,
    set_gradients,
    snapshot,
)
from torch import nn

pytestmark = ignore_fallback

NOT_FINITE = [math.nan, math.inf, -math.inf]


@plain_cases
def test_sparse_gradient_is_refused_before_any_group_changes(make):
    embedding = nn.Embedding(5, 3, sparse=True)
    model = mlp()
    optimizer = make(
        [
            {"params": [(n, p) for n, p in model.named_parameters()]},
            {"params": [("table", embedding.weight)]},
        ]
    )
    set_gradients(model.parameters(), 0)
    embedding(torch.tensor([1, 2])).sum().backward()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"gradient of parameter 'table'.*sparse"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    embedding.weight.grad = embedding.weight.grad.to_dense()
    optimizer.step()


def poison(p: nn.Parameter, value: float) -> None:
    p.grad.view(-1)[-1] = value


@plain_cases
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("which", [0, 1, 5])
def test_one_gradient_that_is_not_finite_skips_the_step_of_its_group(make, value, which, device):
    model, bystander = mlp(device), nn.Parameter(torch.ones(3, 3, device=device))
    optimizer = make([{"params": list(model.parameters())}, {"params": [bystander]}])
    set_gradients([bystander], 0)
    run(model, optimizer)
    optimizer.check_errors()
    before = snapshot(optimizer)
    set_gradients(model.parameters(), 4)
    poison(list(model.parameters())[which], value)
    optimizer.step()
    optimizer.check_errors()
    state_dict, params = snapshot(optimizer)
    skipped = range(len(params) - 1)
    assert_same(params[:-1], before[1][:-1])
    assert_same([state_dict["state"][i] for i in skipped], [before[0]["state"][i] for i in skipped])
    assert not torch.equal(params[-1], before[1][-1])


@all_cases
def test_skipped_steps_leave_no_trace_in_what_follows(make, device):
    clean, skipping = mlp(device), mlp(device)
    optimizers = [make(clean.parameters()), make(skipping.parameters())]
    for step in range(9):
        run(clean, optimizers[0], step, 1)
        run(skipping, optimizers[1], step, 1)
        for _ in range(step % 3):
            give_gradients(skipping, optimizers[1], 50)
            poison(skipping[0].weight, math.nan)
            optimizers[1].step()
        optimizers[1].check_errors()
    assert_same(
        [p.detach() for p in skipping.parameters()], [p.detach() for p in clean.parameters()]
    )
    states = [optimizer.state_dict()["state"].values() for optimizer in optimizers]
    if device.type == "cuda":  # a batch is kept before the host knows that its step was skipped
        states = [map(computed_state, of_params) for of_params in states]
    assert_same(*map(list, states))


@all_cases
def test_very_first_gradient_may_be_skipped(make):
    model, clean = mlp(), mlp()
    optimizer = make(model.parameters())
    give_gradients(model, optimizer, 9)
    poison(model[0].weight, math.inf)
    optimizer.step()
    assert all(s["step"] == 0 for s in optimizer.state.values())
    assert_same(run(model, optimizer), run(clean, make(clean.parameters())))


@all_cases
def test_third_skip_in_a_row_raises_naming_the_first_parameter(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    run(model, optimizer)
    before = snapshot(optimizer)
    for attempt in range(4):
        give_gradients(model, optimizer, attempt)
        poison(model[3].weight, math.nan)
        poison(model[3].bias, math.inf)
        if attempt < 2:
            optimizer.step()
            optimizer.check_errors()
        else:
            with pytest.raises(RuntimeError, match=r"'3.weight' of group 0"):
                optimizer.step()
            with pytest.raises(RuntimeError, match=r"'3.weight' of group 0"):
                optimizer.check_errors()
    assert_same(snapshot(optimizer), before)
    run(model, optimizer, 5, 2)
    optimizer.check_errors()


@all_cases
def test_a_good_step_between_skips_starts_the_count_again(make):
    model = mlp()
    optimizer = make(model.parameters())
    for step in range(12):
        give_gradients(model, optimizer, step)
        if step % 3:
            poison(model[0].weight, math.nan)
        optimizer.step()
    optimizer.check_errors()
    assert optimizer.state[model[0].weight]["step"] == 4


@capturing_cases
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("which", [0, 1, 2, 5])
def test_one_gradient_that_is_not_finite_skips_the_step_of_all_groups(make, value, which, device):
    """Factors and samples of all groups belong together."""
    model = mlp(device)
    params = list(model.parameters())
    optimizer = make([{"params": params[:3]}, {"params": params[3:]}])
    run(model, optimizer)
    optimizer.check_errors()
    before = snapshot(optimizer)
    give_gradients(model, optimizer, 4)
    poison(params[which], value)
    optimizer.step()
    optimizer.check_errors()
    assert_same(snapshot(optimizer), before)
    run(model, optimizer, 5, 2)


@plain_cases
def test_groups_are_all_stepped_before_one_raises(make):
    bad, good = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    optimizer = make([{"params": [bad]}, {"params": [good]}])
    for step in range(3):
        set_gradients([bad, good], step)
        poison(bad, math.nan)
        if step < 2:
            optimizer.step()
    with pytest.raises(RuntimeError, match="parameter 0 of group 0"):
        optimizer.step()
    assert optimizer.state[good]["step"] == 3


def step_with_nan(model, optimizer):
    give_gradients(model, optimizer, 0)
    poison(model[3].weight, math.nan)
    optimizer.step()


@pytest.mark.cuda
@all_cases
def test_on_a_gpu_the_third_skip_is_reported_by_a_later_step(make):
    model = mlp("cuda")
    optimizer = make(model.named_parameters())
    for _ in range(2):
        step_with_nan(model, optimizer)
        torch.cuda.synchronize()

    def two_more():
        step_with_nan(model, optimizer)
        torch.cuda.synchronize()
        step_with_nan(model, optimizer)

    with pytest.raises(RuntimeError, match=r"'3.weight' of group 0"):
        two_more()


@pytest.mark.cuda
@all_cases
def test_on_a_gpu_check_errors_reports_at_once(make):
    model = mlp("cuda")
    optimizer = make(model.named_parameters())
    step_with_nan(model, optimizer)
    step_with_nan(model, optimizer)
    optimizer.check_errors()

    def third() -> None:
        step_with_nan(model, optimizer)  # reports it already if the device is fast
        optimizer.check_errors()

    with pytest.raises(RuntimeError, match=r"'3.weight' of group 0"):
        third()
    run(model, optimizer)
    optimizer.check_errors()
