"""NaturalGradient.update_damping(): the rule of Levenberg and Marquardt. That of K-FAC has the same core."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from reference import fisher
from reference.per_sample import per_sample_gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torchium import NaturalGradient


def network(device: torch.device | str = "cpu") -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model.to(device, torch.float64)


def batch(step: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator).to(device, torch.float64)
    return x, torch.randint(3, (16,), generator=generator).to(device)


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    x, y = batch(step, next(model.parameters()).device)
    return F.cross_entropy(model(x), y)


def make(model: nn.Module, **options: Any) -> NaturalGradient:
    return NaturalGradient(
        model, **{"lr": 0.5, "momentum": 0.0, "adaptive_damping": True, **options}
    )


def take_step(model: nn.Module, optimizer: NaturalGradient, step: int = 0) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    return loss.item()


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten().cpu() for t in tensors])


@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("lr", [0.5, 2.5])
def test_the_ratio_is_that_of_the_quadratic_model(lr, max_norm, solver, device):
    model = network(device)
    optimizer = make(model, lr=lr, max_norm=max_norm, solver=solver, eps=1e-13)
    for step in range(3):
        old, twin = flat(model.parameters()), copy.deepcopy(model).cpu()
        rows = per_sample_gradients(twin, F.cross_entropy, *batch(step))
        matrix = fisher(torch.cat([r.flatten(1) for r in rows.values()], 1))
        matrix += optimizer.param_groups[0]["damping"] * torch.eye(len(matrix)).double()
        before = take_step(model, optimizer, step)
        v = flat(p.grad for p in model.parameters())
        delta = flat(model.parameters()) - old
        after = loss_of(model, step).item()
        expected = -float(v @ delta + delta @ matrix @ delta / 2)
        ratio = optimizer.update_damping(before, after)
        if expected > 0:
            assert ratio == pytest.approx((before - after) / expected, rel=1e-6)
        else:  # the model predicts no reduction
            assert math.isnan(ratio)


@pytest.mark.parametrize(
    ("part", "power"), [(0.8, 1), (0.74, 0), (0.26, 0), (0.2, -1), (-3.0, -1), (math.nan, -1)]
)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("maximize", [False, True])
def test_the_damping_follows_the_ratio(maximize, steps, part, power):
    sign = -1.0 if maximize else 1.0

    def after_steps() -> NaturalGradient:
        model = network()
        optimizer = make(model, maximize=maximize)
        for step in range(steps):
            take_step(model, optimizer, step)
        return optimizer

    predicted = 1.0 / after_steps().update_damping(0.0, -sign)
    optimizer = after_steps()
    ratio = optimizer.update_damping(1.0, 1.0 - sign * part * predicted)
    assert ratio == (pytest.approx(part) if math.isfinite(part) else -math.inf)
    damping = optimizer.param_groups[0]["damping"]
    assert damping == pytest.approx(0.95 ** (power * steps), rel=1e-12)


def test_the_damping_of_all_groups_changes_and_counts():
    model = network()
    groups = [
        {"params": model[0].parameters(), "damping": 1.0},
        {"params": model[2].parameters(), "damping": 0.1},
    ]
    optimizer = make(groups, update_freq=2)
    for step in range(4):
        before = take_step(model, optimizer, step)
        optimizer.update_damping(before, -1e6)
    assert [g["damping"] for g in optimizer.param_groups] == pytest.approx(
        [0.95**4, 0.1 * 0.95**4], rel=1e-12
    )


def test_a_skipped_step_predicts_no_reduction():
    model = network()
    optimizer = make(model)
    take_step(model, optimizer)
    optimizer.zero_grad()
    (loss_of(model) * math.nan).backward()
    optimizer.step()
    assert math.isnan(optimizer.update_damping(1.0, 0.5))
    assert optimizer.param_groups[0]["damping"] == 1.0


def test_a_learning_rate_in_a_tensor_may_change_after_the_step():
    ratios = []
    for lr in (0.5, torch.tensor(0.5)):
        model = network()
        optimizer = make(model, lr=lr)
        before = take_step(model, optimizer)
        if isinstance(lr, Tensor):
            lr.fill_(7.0)
        ratios.append(optimizer.update_damping(before, before - 0.1))
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-6)


def test_errors():
    model = network()
    with pytest.raises(ValueError, match="adaptive_damping=True compares steps without momentum"):
        NaturalGradient(model, adaptive_damping=True)
    plain = NaturalGradient(model, momentum=0.0)
    take_step(model, plain)
    with pytest.raises(ValueError, match="needs adaptive_damping=True"):
        plain.update_damping(1.0, 0.5)
    optimizer = make(model)
    with pytest.raises(ValueError, match=r"call it once after step\(\)"):
        optimizer.update_damping(1.0, 0.5)
    take_step(model, optimizer)
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="loss_before must be finite"):
            optimizer.update_damping(wrong, 0.5)
    with pytest.raises(ValueError, match="loss_after must be one number"):
        optimizer.update_damping(1.0, torch.ones(2))
    optimizer.update_damping(1.0, 0.5)
    with pytest.raises(ValueError, match=r"call it once after step\(\)"):
        optimizer.update_damping(1.0, 0.5)
    groups = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": model[2].parameters(), "lr": 0.1},
    ]
    optimizer = make(groups)
    take_step(model, optimizer)
    with pytest.raises(ValueError, match=r"one lr for all groups, got 0\.5 and 0\.1"):
        optimizer.update_damping(1.0, 0.5)
