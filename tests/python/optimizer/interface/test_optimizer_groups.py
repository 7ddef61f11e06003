"""Parameter groups, learning rates, schedulers, and options changed between steps."""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import (
    all_cases,
    assert_same,
    give_gradients,
    ignore_fallback,
    mlp,
    plain_cases,
    plain_or_kfac_cases,
    run,
    set_gradients,
    snapshot,
    values,
)
from torch import nn
from torch.optim import lr_scheduler

pytestmark = ignore_fallback


@plain_cases
def test_groups_with_their_own_options_equal_separate_optimizers(make):
    together, apart = mlp(), mlp()
    optimizer = make(
        [
            {"params": together[0].parameters(), "lr": 0.2, "eps": 1e-2},
            {"params": [*together[1].parameters(), *together[3].parameters()], "weight_decay": 0.1},
        ]
    )
    separate = [
        make(apart[0].parameters(), lr=0.2, eps=1e-2),
        make([*apart[1].parameters(), *apart[3].parameters()], weight_decay=0.1),
    ]
    for step in range(5):
        for model in (together, apart):
            set_gradients(model.parameters(), step)
        optimizer.step()
        for other in separate:
            other.step()
    assert_same(values(together), values(apart))


@all_cases
def test_a_later_group_has_names_as_the_others_have(make):
    model = mlp()
    named = make(list(model[:2].named_parameters()))
    with pytest.raises(ValueError, match=r"group 1 has no names.*module\.named_parameters\(\)"):
        named.add_param_group({"params": model[3].parameters()})
    named.add_param_group({"params": model[3].named_parameters()})
    plain = make(list(model[:2].parameters()))
    with pytest.raises(ValueError, match=r"group 1 has names.*pass module\.parameters\(\)"):
        plain.add_param_group({"params": model[3].named_parameters()})
    plain.add_param_group({"params": model[3].parameters()})
    assert len(named.param_groups) == len(plain.param_groups) == 2


@all_cases
def test_a_parameter_appended_by_hand_has_no_name(make):
    model = mlp()
    params = list(model.named_parameters())
    optimizer = make(params[:-1])
    optimizer.param_groups[0]["params"].append(params[-1][1])
    run(model, optimizer)
    twin = mlp()
    assert_same(values(model), run(twin, make(twin.parameters())))
    names = [each.name for each in optimizer.memory_report().parameters]
    assert names == [*(name for name, _ in params[:-1]), "parameter 5 of group 0"]
    saved = optimizer.state_dict()
    saved["state"][5]["step"].fill_(-1)
    with pytest.raises(ValueError, match="parameter 5 of group 0"):
        optimizer.load_state_dict(saved)
    if hasattr(optimizer, "report"):
        optimizer.report()


@plain_cases
def test_group_added_in_mid_training_equals_a_later_optimizer(make):
    together, apart = mlp(), mlp()
    optimizer = make(together[0].parameters())
    first = make(apart[0].parameters())
    later = None
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": list(together[3].parameters()), "lr": 0.3})
            later = make(apart[3].parameters(), lr=0.3)
        for model in (together, apart):
            set_gradients(model.parameters(), step)
        optimizer.step()
        first.step()
        if later:
            later.step()
    assert_same(values(together), values(apart))


@all_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_lr_may_be_a_tensor(make, dtype, shape):
    number, tensor = mlp(), mlp()
    lr = torch.full(shape, 0.0625, dtype=dtype)
    optimizers = [make(number.parameters(), lr=0.0625), make(tensor.parameters(), lr=lr)]
    run(number, optimizers[0])
    run(tensor, optimizers[1])
    assert_same(values(tensor), values(number))
    lr.fill_(0.0)
    assert_same(run(tensor, optimizers[1], steps=1), values(number))


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "one_cycle_lr_only": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=0.1, total_steps=10, cycle_momentum=False
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


@all_cases
@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_set_the_learning_rate_of_the_next_step(make, schedule):
    scheduled, by_hand = mlp(), mlp()
    optimizer, other = make(scheduled.parameters()), make(by_hand.parameters())
    scheduler = schedule(optimizer)
    seen = []
    for step in range(6):
        other.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        seen.append(scheduler.get_last_lr()[0])
        run(scheduled, optimizer, step, 1)
        run(by_hand, other, step, 1)
        scheduler.step()
    assert len(set(seen)) > 1
    assert_same(values(scheduled), values(by_hand))


@all_cases
def test_reduce_on_plateau_lowers_the_learning_rate(make):
    model = mlp()
    optimizer = make(model.parameters())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    lr = optimizer.param_groups[0]["lr"]
    for step in range(3):
        run(model, optimizer, step, 1)
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == lr * 0.25


@plain_or_kfac_cases
def test_options_set_in_mid_run_are_checked_before_anything_changes(make):
    model = mlp()
    optimizer = make(model.parameters())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    run(model, optimizer)
    give_gradients(model, optimizer, 4)
    set_gradients(optimizer.param_groups[1]["params"], 0)
    for name, value in {"lr": -1.0, "eps": float("inf"), "weight_decay": -0.5}.items():
        good = optimizer.param_groups[1][name]
        optimizer.param_groups[1][name] = value
        before = snapshot(optimizer)
        with pytest.raises(ValueError, match=name):
            optimizer.step()
        assert_same(snapshot(optimizer), before)
        optimizer.param_groups[1][name] = good
    optimizer.step()


@all_cases
def test_state_that_other_code_keeps_beside_ours_survives(make):
    """As wrappers like Lookahead do."""
    model = mlp()
    optimizer = make(model.parameters())
    slow = [torch.zeros_like(p) for p in model.parameters()]
    for p, s in zip(model.parameters(), slow, strict=True):
        optimizer.state[p]["slow"] = s
    run(model, optimizer)
    assert all(
        optimizer.state[p]["slow"] is s for p, s in zip(model.parameters(), slow, strict=True)
    )
    other = mlp()
    assert_same(run(other, make(other.parameters())), values(model))
