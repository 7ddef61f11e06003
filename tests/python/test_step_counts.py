"""What the host and the device know about the number of steps stays right."""

from __future__ import annotations

import pytest
import torch
import torchium
from optimizer_cases import (
    ALL_CASES,
    CASES,
    all_cases,
    assert_same,
    give_gradients,
    ignore_fallback,
    mlp,
    run,
    values,
)
from torch import nn

pytestmark = ignore_fallback

LARGEST_FLOAT32_COUNT = 2**24


def start_at(optimizer: torch.optim.Optimizer, count: int) -> torch.optim.Optimizer:
    """As if that many steps had been taken, in a checkpoint."""
    state_dict = optimizer.state_dict()
    for state in state_dict["state"].values():
        state["step"].fill_(count)
    optimizer.load_state_dict(state_dict)
    return optimizer


@all_cases
def test_counts_go_on_beyond_those_of_a_float32(make, device):
    model = mlp(device)
    optimizer = make(model.parameters())
    run(model, optimizer, 0, 2)
    start_at(optimizer, LARGEST_FLOAT32_COUNT - 1)
    run(model, optimizer, 2, 4)
    optimizer.check_errors()
    for p in model.parameters():
        assert optimizer.state[p]["step"] == LARGEST_FLOAT32_COUNT + 3


def test_schedules_go_on_beyond_the_counts_of_a_float32(device):
    p = nn.Parameter(torch.eye(4, device=device))
    kfac_model = nn.Sequential(nn.Linear(6, 5)).to(device)
    shampoo = torchium.Shampoo([p], update_freq=3)
    kfac = torchium.KFAC(kfac_model, TCov=1, TInv=3)

    def step_all() -> None:
        p.grad = torch.rand_like(p)
        shampoo.step()
        kfac.zero_grad()
        kfac_model(torch.rand(8, 6, device=device)).sum().backward()
        kfac.step()

    step_all()
    start_at(shampoo, LARGEST_FLOAT32_COUNT)
    start_at(kfac, LARGEST_FLOAT32_COUNT)
    renewed: dict[str, list[int]] = {"roots.0": [], "A_inverse": []}
    for t in range(1, 8):
        state = {**shampoo.state[p], **kfac.state[kfac_model[0].weight]}
        before = {key: state[key].clone() for key in renewed}
        step_all()
        for key, steps in renewed.items():
            if not torch.equal(before[key], state[key]):
                steps.append(t)
    # Due at the steps that 3 divides, in K-FAC at those behind them; 2^24 + 2 is the first.
    assert renewed == {"roots.0": [2, 5], "A_inverse": [3, 6]}


@all_cases
def test_float32_counts_of_earlier_versions_are_loaded(make):
    model = mlp()
    optimizer = make(model.parameters())
    run(model, optimizer)
    expected = optimizer.state_dict()
    old = optimizer.state_dict()
    for state in old["state"].values():
        state["step"] = state["step"].float()
    optimizer.load_state_dict(old)
    assert_same(optimizer.state_dict(), expected)


@pytest.mark.parametrize("name", ALL_CASES)
def test_a_step_that_raises_in_its_midst_leaves_no_wrong_count(name, device, monkeypatch):
    """Out of memory, for one: the operator may have counted the step already, or not."""
    model = mlp(device, torch.float64)
    optimizer = ALL_CASES[name](model.parameters())
    plain = name in CASES
    run(model, optimizer, 0, 3)
    run_step = optimizer._run_step

    def fails(after: bool) -> None:
        def raising(*args, **options):
            if after:
                run_step(*args, **options)
            raise torch.OutOfMemoryError("a test")

        monkeypatch.setattr(optimizer, "_run_step", raising)
        give_gradients(model, optimizer, 3)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        monkeypatch.undo()

    for after, taken in ((False, 3), (True, 4)):
        fails(after)
        params = list(model.parameters())
        assert optimizer.state[params[0]]["step"] == taken
        if not plain or device.type == "cuda":
            assert optimizer._known_host_steps(params) == [taken] * len(params)
    run(model, optimizer, 4, 2)
    optimizer.check_errors()
    if not plain or device.type == "cuda":
        assert optimizer._known_host_steps(params) == [6] * len(params)
    assert all(bool(v.isfinite().all()) for v in values(model))


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_a_skip_that_is_reported_late_is_not_taken_back_twice(name, monkeypatch):
    model = mlp("cuda")
    optimizer = CASES[name](model.parameters())
    run(model, optimizer, 0, 3)
    give_gradients(model, optimizer, 3)
    next(model.parameters()).grad.fill_(float("nan"))
    torch.cuda._sleep(50_000_000)  # the report of the skip is still under way
    optimizer.step()
    monkeypatch.setattr(optimizer, "_run_step", lambda *args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    monkeypatch.undo()
    run(model, optimizer, 3, 1)
    optimizer.check_errors()
    params = list(model.parameters())
    assert optimizer.state[params[0]]["step"] == 4
    assert optimizer._known_host_steps(params) == [4] * len(params)
