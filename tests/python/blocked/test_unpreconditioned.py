"""Parameters without matrices: preconditioned=False and max_preconditioned_dim."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchium
from optimizer_cases import assert_same, set_gradients
from parity_tools import make
from torch import nn

SHAPES = ((12, 6), (7,), (4, 3, 2, 2), (), (5, 3, 4), (0, 3))
ADAM = {"lr": 0.01, "betas": (0.9, 0.95), "grafting": "adam", "grafting_beta2": 0.95}


def parameters(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES
    ]


def run(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("options", [{"preconditioned": False}, {"max_preconditioned_dim": 1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_are_adamws(options, dtype, device):
    decay = {"weight_decay": 0.1}
    ours = torchium.Shampoo(
        parameters(device, dtype), **ADAM, decoupled_weight_decay=True, **decay, **options
    )
    theirs = torch.optim.AdamW(parameters(device, dtype), lr=0.01, betas=(0.9, 0.95), **decay)
    tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 1e-12}
    for step in range(5):
        for actual, expected in zip(run(ours, 4, 4 * step), run(theirs, 4, 4 * step), strict=True):
            if actual.dim() > 0:  # no limit excludes a scalar
                torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("grafting", ["adam", "rmsprop", "adagrad"])
@pytest.mark.parametrize("language", ["python", "cpp"])
def test_state_is_that_of_the_grafted_method(grafting, language):
    params = parameters()
    optimizer = make(
        language, "Shampoo", params, preconditioned=False, grafting=grafting, betas=(0.9, 0.99)
    )
    set_gradients(params, 0)
    optimizer.step()
    for p in params:
        state = optimizer.state[p] if language == "python" else optimizer.state(p)
        averages = ("exp_avg", "grafting_second_moment")
        assert set(state) == {"step", *averages, *(f"{key}_start" for key in averages)}


@pytest.mark.parametrize("grafting", [None, "sgd"])
def test_without_a_second_moment_it_is_the_diagonal_rule(grafting):
    p = nn.Parameter(torch.zeros(6, 4))
    optimizer = torchium.Shampoo([p], preconditioned=False, grafting=grafting, lr=1.0, eps=0.5)
    p.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    direction = p.grad * (p.grad**2 + 0.5).rsqrt()
    if grafting == "sgd":
        direction *= p.grad.norm() / direction.norm()
    torch.testing.assert_close(p.detach(), -direction)
    assert set(optimizer.state[p]) == {"step", "diagonal"}


def test_the_limit_is_a_limit_of_merged_dimensions():
    shapes = {
        (16384, 2): True,
        (16385, 2): False,
        (2, 16385): False,
        (64, 512, 3, 3): True,  # [64, 4608]
        (4, 2048, 3, 3): False,  # [4, 18432]
        (16385,): False,
    }
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    report = torchium.ShampooW(params).report()
    for line, inside in zip(report.parameters, shapes.values(), strict=True):
        assert (line.rule == "adam") == (not inside), line
    unlimited = torchium.ShampooW(params, max_preconditioned_dim=None).report()
    assert {line.rule for line in unlimited.parameters} == {"preconditioned", "diagonal"}


def test_an_embedding_of_a_large_vocabulary_costs_little_memory():
    params = [nn.Parameter(torch.empty(50000, 768, device="meta"))]
    total = torchium.Shampoo.from_adamw(params).memory_report().total
    assert total.state.total <= 2.01 * total.parameters
    plain = torchium.Shampoo(params, betas=(0.9, 0.99), grafting="sgd").memory_report().total
    assert plain.state.total <= 3.2 * plain.parameters


@pytest.mark.parametrize("language", ["python", "cpp"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"preconditioned": False}),
        ({"preconditioned": False}, {}),
        ({"max_preconditioned_dim": 5}, {"max_preconditioned_dim": None}),
        ({}, {"max_preconditioned_dim": 5}),
    ],
)
def test_a_checkpoint_brings_its_options(language, before, after):
    options = {"betas": (0.9, 0.99), "grafting": "adam", "update_freq": 2}
    twins = [parameters(), parameters()]
    whole = make(language, "Shampoo", twins[0], **options, **before)
    other = make(language, "Shampoo", twins[1], **options, **after)
    for step in range(6):
        if step == 3:
            if language == "python":
                other.load_state_dict(copy.deepcopy(whole.state_dict()))
            else:
                other.load_bytes(whole.save_bytes())
            with torch.no_grad():
                for p, q in zip(*twins, strict=True):
                    q.copy_(p)
        for params in twins:
            set_gradients(params, step)
        whole.step()
        if step >= 3:
            other.step()
    assert_same([p.detach() for p in twins[1]], [p.detach() for p in twins[0]])


def test_a_checkpoint_from_before_the_options_existed():
    """The optimizer's own values apply; state of another rule raises an error with its key."""
    options = {"betas": (0.9, 0.99), "grafting": "adam"}
    whole = torchium.Shampoo(parameters(), **options)
    run(whole, 2)
    saved = whole.state_dict()
    for group in saved["param_groups"]:
        del group["preconditioned"], group["max_preconditioned_dim"]
    same = torchium.Shampoo(parameters(), **options)
    same.load_state_dict(copy.deepcopy(saved))
    assert same.param_groups[0]["max_preconditioned_dim"] == 16384
    other = torchium.Shampoo(parameters(), max_preconditioned_dim=8, **options)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*dimension 12 above.*None"):
        other.load_state_dict(saved)
    assert not any(other.state.values())


@pytest.mark.parametrize("option", [{"preconditioned": True}, {"grafting": None}])
def test_it_cannot_be_switched_in_mid_run(option):
    params = parameters()
    optimizer = torchium.Shampoo(params, preconditioned=False, grafting="adam")
    before = run(optimizer, 2)
    optimizer.param_groups[0].update(option)
    set_gradients(params, 2)
    (name,) = option
    for refused in (optimizer.step, optimizer.update_preconditioners):
        with pytest.raises(ValueError, match=f"parameter 0 of group 0.*after the change of {name}"):
            refused()
    assert_same([p.detach() for p in params], before)


def test_entries_without_gradients_stay_without_damping(device):
    param = torch.nn.Parameter(torch.ones(4, 3, device=device))
    optimizer = torchium.ShampooW(
        [{"params": [param], "preconditioned": False}], eps=0.0, weight_decay=0.0
    )
    param.grad = torch.zeros_like(param)
    param.grad[1] = 1.0
    optimizer.step()
    assert (param[[0, 2, 3]] == 1.0).all()
    assert (param[1] < 1.0).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_stops_at_the_largest_number(device, momentum):
    param = torch.nn.Parameter(torch.full((4, 3), 6e4, dtype=torch.float16, device=device))
    optimizer = torchium.Shampoo(
        [param], lr=1e5, preconditioned=False, momentum=momentum, grafting="adam"
    )
    param.grad = torch.full_like(param, -1.0)
    optimizer.step()
    assert (param == torch.finfo(torch.float16).max).all()


def test_update_preconditioners_leaves_it_alone(device):
    params = parameters(device)
    groups = [{"params": params[:3], "preconditioned": False}, {"params": params[3:]}]
    optimizer = torchium.Shampoo(groups, capturable=True, **ADAM)
    run(optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict()["state"][0])
    optimizer.update_preconditioners()
    assert_same(optimizer.state_dict()["state"][0], before)


def test_a_skipped_step_changes_nothing(device):
    params = parameters(device)
    optimizer = torchium.Shampoo(params, preconditioned=False, **ADAM)
    run(optimizer, 1)
    before = copy.deepcopy((optimizer.state_dict()["state"], [p.detach() for p in params]))
    set_gradients(params, 1)
    params[0].grad[0, 0] = torch.nan
    optimizer.step()
    after = copy.deepcopy((optimizer.state_dict()["state"], [p.detach() for p in params]))
    assert_same(after, before)
