"""The host's and the device's step counts stay correct."""

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
    trained,
    values,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchium.optimizers._blocked.base import BlockedOptimizer

pytestmark = ignore_fallback

LARGEST_FLOAT32_COUNT = 2**24


def start_at(optimizer: torch.optim.Optimizer, count: int) -> torch.optim.Optimizer:
    """As after loading a checkpoint with that many steps."""
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
    # Due at multiples of 3, in K-FAC one step later; 2^24 + 2 is the first.
    assert renewed == {"roots.0": [2, 5], "A_inverse": [3, 6]}


@all_cases
def test_float32_counts_of_earlier_versions_are_loaded(make):
    _model, optimizer = trained(make)
    expected = optimizer.state_dict()
    old = optimizer.state_dict()
    for state in old["state"].values():
        state["step"] = state["step"].float()
    optimizer.load_state_dict(old)
    assert_same(optimizer.state_dict(), expected)


class OutOfMemory(TorchDispatchMode):
    """Raises in the operator with this number; counts operators."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        if self.calls == self.fails_at:
            raise torch.OutOfMemoryError("a test")
        return func(*args, **(kwargs or {}))


def counts_on_host(optimizer, params: list[torch.Tensor]) -> dict[torch.Tensor, int]:
    """Steps taken, for the parameters whose count the host knows."""
    if isinstance(optimizer, BlockedOptimizer):
        known = {p: optimizer._plans.host_steps(p) for p in params}
    else:
        counts = optimizer._plan.core.host_steps()
        known = dict(zip(optimizer._plan.params, counts, strict=True))
    return {p: count for p, count in known.items() if count >= 0}


@pytest.mark.parametrize("name", ALL_CASES)
def test_a_step_that_raises_in_its_midst_leaves_no_wrong_count(name, device):
    """For example out of memory: the step may already be counted, or not."""
    model = mlp(device, torch.float64)
    optimizer = ALL_CASES[name](model.parameters())
    run(model, optimizer, 0, 3)
    params = list(model.parameters())
    lengths = []
    for index in (3, 4, 5):  # not all of them refresh something
        give_gradients(model, optimizer, index)
        with OutOfMemory() as whole:
            optimizer.step()
        lengths.append(whole.calls)
    shortest = min(lengths)
    for fails_at in sorted({1, shortest // 2 + 1, shortest}):
        give_gradients(model, optimizer, 6)
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(fails_at):
            optimizer.step()
        known = counts_on_host(optimizer, params)
        assert all(optimizer.state[p]["step"] == count for p, count in known.items())
    taken = int(optimizer.state[params[0]]["step"])
    assert 6 <= taken <= 9
    run(model, optimizer, 9, 2)
    optimizer.check_errors()
    known = counts_on_host(optimizer, params)
    assert set(known.values()) <= {taken + 2}
    no_schedule = device.type == "cpu" or name == "adagrad"  # no schedule needs the host's count
    assert len(known) == len(params) or (no_schedule and not known)
    assert all(optimizer.state[p]["step"] == taken + 2 for p in params)
    assert all(bool(v.isfinite().all()) for v in values(model))


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_a_skip_that_is_reported_late_is_not_taken_back_twice(name):
    model = mlp("cuda")
    optimizer = CASES[name](model.parameters())
    run(model, optimizer, 0, 3)
    params = list(model.parameters())
    give_gradients(model, optimizer, 3)
    params[0].grad.fill_(float("nan"))
    torch.cuda._sleep(50_000_000)  # the report of the skip is still in flight
    optimizer.step()
    with pytest.raises(torch.OutOfMemoryError), OutOfMemory(fails_at=1):
        optimizer.step()
    run(model, optimizer, 3, 1)
    optimizer.check_errors()
    assert optimizer.state[params[0]]["step"] == 4
    expected = {} if name == "adagrad" else dict.fromkeys(params, 4)  # it has no schedule
    assert counts_on_host(optimizer, params) == expected
