"""update_damping(): the rule of Levenberg and Marquardt for K-FAC and natural gradient."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from optimizer_cases import values
from reference import fisher
from reference.per_sample import per_sample_gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torchium import KFAC, KFACPreconditioner, NaturalGradient

pytestmark = pytest.mark.filterwarnings("ignore:KFAC")

Optimizer = KFAC | NaturalGradient

OPTIONS: dict[type[Optimizer], dict[str, Any]] = {
    KFAC: {"damping": 0.01, "TCov": 1, "TInv": 1},
    NaturalGradient: {"damping": 1.0},
}
both = pytest.mark.parametrize("kind", OPTIONS)


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


def penalized_loss(model: nn.Module, step: int, weight_decay: float) -> float:
    penalty = sum(p.detach().square().sum().item() for p in model.parameters())
    return loss_of(model, step).item() + weight_decay / 2 * penalty


def make(kind: type[Optimizer], params: Any, **options: Any) -> Any:
    defaults = {"lr": 0.5, "momentum": 0.0, "adaptive_damping": True, **OPTIONS[kind]}
    return kind(params, **{**defaults, **options})


def take_step(model: nn.Module, optimizer: Optimizer, step: int = 0) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    return loss.item()


def joint(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([weight, bias[:, None]], 1)


def model_reduction(
    optimizer: KFAC, model: nn.Sequential, V: list[Tensor], before: list[Tensor]
) -> float:
    """- V . delta - delta . F delta / 2 with the dense damped Fisher matrix F of each layer."""
    group, total = optimizer.param_groups[0], 0.0
    split, damping = group["damping_split"], group["damping"]
    for k, layer in enumerate((model[0], model[2])):
        delta = joint(layer.weight, layer.bias).detach() - joint(*before[2 * k : 2 * k + 2])
        state = optimizer.state[layer.weight]
        A, G = state["A"][0], state["G"][0]
        I_A, I_G = torch.eye(len(A)).to(A), torch.eye(len(G)).to(G)
        if split == "exact":
            F = torch.kron(G, A) + damping * torch.eye(delta.numel()).to(A)
        else:
            pi = 1.0 if split == "plain" else (A.diag().mean() / G.diag().mean()).sqrt()
            root = math.sqrt(damping)
            F = torch.kron(G + root / pi * I_G, A + pi * root * I_A)
        v, d = joint(*V[2 * k : 2 * k + 2]).flatten(), delta.flatten()
        total -= float(v @ d + d @ F @ d / 2)
    return total


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kl_clip", [None, 1e-4])
@pytest.mark.parametrize("split", ["pi", "plain", "exact"])
def test_the_ratio_is_that_of_the_quadratic_model_of_kfac(split, kl_clip, weight_decay, device):
    model = network(device)
    optimizer = make(KFAC, model, damping_split=split, kl_clip=kl_clip, weight_decay=weight_decay)
    for step in range(3):
        before, old = penalized_loss(model, step, weight_decay), values(model)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        V = [p.grad + weight_decay * p.detach() for p in model.parameters()]
        optimizer.step()
        expected = model_reduction(optimizer, model, V, old)
        after = penalized_loss(model, step, weight_decay)
        ratio = optimizer.update_damping(before, after)
        assert ratio == pytest.approx((before - after) / expected, rel=1e-6)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten().cpu() for t in tensors])


@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("lr", [0.5, 2.5])
def test_the_ratio_is_that_of_the_quadratic_model_of_natural_gradient(lr, max_norm, solver, device):
    model = network(device)
    optimizer = make(NaturalGradient, model, lr=lr, max_norm=max_norm, solver=solver, eps=1e-13)
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


@both
def test_a_learning_rate_that_is_written_after_the_step_does_not_count(kind):
    """As by a scheduler, where it is a tensor."""
    ratios = []
    for later in (0.5, 0.1):
        model = network()
        optimizer = make(kind, model, lr=torch.tensor(0.5))
        before = take_step(model, optimizer)
        optimizer.param_groups[0]["lr"].fill_(later)
        ratios.append(optimizer.update_damping(before, loss_of(model).item()))
    assert ratios[0] == ratios[1]


def change_weight_decay(optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1


def add_a_group(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [("other", nn.Parameter(torch.ones(2).double()))]})


def take_a_step_without_gradients(optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer.step()


@both
@pytest.mark.parametrize(
    "change", [change_weight_decay, add_a_group, take_a_step_without_gradients]
)
def test_a_change_after_the_step_does_not_count(kind, change):
    ratios = []
    for is_changed in (False, True):
        model = network()
        optimizer = make(kind, model)
        before = take_step(model, optimizer)
        if is_changed:
            change(optimizer)
        ratios.append(optimizer.update_damping(before, loss_of(model).item()))
    assert ratios[0] == ratios[1]


@both
@pytest.mark.parametrize(
    ("part", "power"), [(0.8, 1), (0.74, 0), (0.26, 0), (0.2, -1), (-3.0, -1), (math.nan, -1)]
)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("maximize", [False, True])
def test_the_damping_follows_the_ratio(kind, maximize, steps, part, power):
    sign = -1.0 if maximize else 1.0

    def after_steps() -> Any:
        model = network()
        optimizer = make(kind, model, maximize=maximize)
        for step in range(steps):
            take_step(model, optimizer, step)
        return optimizer

    predicted = 1.0 / after_steps().update_damping(0.0, -sign)
    optimizer = after_steps()
    ratio = optimizer.update_damping(1.0, 1.0 - sign * part * predicted)
    assert ratio == (pytest.approx(part) if math.isfinite(part) else -math.inf)
    damping = optimizer.param_groups[0]["damping"]
    expected = OPTIONS[kind]["damping"] * 0.95 ** (power * steps)
    assert damping == pytest.approx(expected, rel=1e-12)


@both
def test_steps_count_from_the_last_call(kind):
    model = network()
    optimizer = make(kind, model)
    for step in range(6):
        take_step(model, optimizer, step)
        if step in (1, 4):
            optimizer.update_damping(1.0, math.inf)
    expected = OPTIONS[kind]["damping"] / 0.95**5
    assert optimizer.param_groups[0]["damping"] == pytest.approx(expected)


def test_steps_that_keep_their_matrix_count():
    model = network()
    optimizer = make(NaturalGradient, model, update_freq=2)
    for step in range(4):
        before = take_step(model, optimizer, step)
        optimizer.update_damping(before, -1e6)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(0.95**4, rel=1e-12)


def trained(damping: float, adapt: bool, **options: Any) -> tuple[float, float]:
    """The last loss and damping."""
    model = network()
    optimizer = make(KFAC, model, lr=1.0, kl_clip=None, damping=damping, **options)
    for step in range(100):
        before = take_step(model, optimizer)
        if adapt and step % 5 == 4:
            optimizer.update_damping(before, loss_of(model))
    return loss_of(model).item(), optimizer.param_groups[0]["damping"]


def test_a_damping_that_is_too_large_falls_and_training_gets_faster():
    fixed, adapted = trained(100.0, False)[0], trained(100.0, True)
    assert adapted[1] < 2.0
    assert adapted[0] < 0.9 * fixed


def test_a_damping_that_is_too_small_grows_and_training_gets_stable():
    fixed, adapted = trained(1e-4, False)[0], trained(1e-4, True)
    assert adapted[1] > 5e-4
    assert adapted[0] < fixed


@both
def test_a_skipped_step_changes_nothing(kind, device):
    model = network(device)
    optimizer = make(kind, model)
    take_step(model, optimizer)
    optimizer.zero_grad()
    loss_of(model).backward()
    model[0].weight.grad[0, 0] = torch.nan
    optimizer.step()
    assert math.isnan(optimizer.update_damping(1.0, 0.5))
    assert optimizer.param_groups[0]["damping"] == OPTIONS[kind]["damping"]


@both
def test_a_learning_rate_tensor(kind, device):
    model, other = network(device), network(device)
    ratios = []
    for each, lr in ((model, 0.5), (other, torch.tensor(0.5, device=device))):
        optimizer = make(kind, each, lr=lr)
        before = take_step(each, optimizer)
        if isinstance(lr, Tensor):
            lr.mul_(0.1)  # by a scheduler, after the step
        ratios.append(optimizer.update_damping(before, loss_of(each)))
    assert ratios[1] == pytest.approx(ratios[0], rel=1e-6)


@both
def test_misuse_raises(kind):
    model = network()
    with pytest.raises(ValueError, match=r"momentum; use momentum=0, got 0\.9"):
        kind(model, adaptive_damping=True)
    off = kind(model, momentum=0.0)
    take_step(model, off)
    with pytest.raises(ValueError, match="needs adaptive_damping=True"):
        off.update_damping(1.0, 0.5)
    optimizer = make(kind, model)
    with pytest.raises(ValueError, match=r"call it once after step\(\)"):
        optimizer.update_damping(1.0, 0.5)
    take_step(model, optimizer)
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"loss_before must be finite, got {wrong}"):
            optimizer.update_damping(wrong, 0.5)
    with pytest.raises(ValueError, match=r"loss_after must be one number.* shape \(2,\)"):
        optimizer.update_damping(1.0, torch.ones(2))
    with pytest.raises(ValueError, match=r"loss_before must be a number .*got None"):
        optimizer.update_damping(None, 0.5)
    optimizer.update_damping(1.0, 0.5)
    with pytest.raises(ValueError, match=r"call it once after step\(\)"):
        optimizer.update_damping(1.0, 0.5)


def test_a_damping_that_is_a_function_raises():
    model = network()
    with pytest.raises(ValueError, match="damping of group 0 is a function of the step"):
        make(KFAC, model, damping=lambda step: 0.1)
    groups = [{"params": model.parameters(), "damping": lambda step: 0.1}]
    with pytest.raises(ValueError, match="damping of group 0 is a function of the step"):
        make(KFAC, groups)
    scheduled = make(KFAC, model)
    scheduled.param_groups[0]["damping"] = lambda step: 0.1
    take_step(model, scheduled)
    with pytest.raises(ValueError, match="damping is a function of the step"):
        scheduled.update_damping(1.0, 0.5)


def test_a_preconditioner_raises():
    model = network()
    preconditioner = KFACPreconditioner(model)
    loss_of(model).backward()
    preconditioner.step()
    with pytest.raises(ValueError, match="does not take the step of the parameters"):
        preconditioner.update_damping(1.0, 0.5)


@both
def test_groups_of_different_learning_rates_raise_and_share_a_damping_rule(kind):
    model = network()
    groups = [
        {"params": list(model[0].parameters()), "damping": 0.1},
        {"params": list(model[2].parameters()), "damping": 0.01},
    ]
    optimizer = make(kind, groups)
    take_step(model, optimizer)
    take_step(model, optimizer)
    optimizer.update_damping(1.0, math.inf)
    assert [group["damping"] for group in optimizer.param_groups] == [
        pytest.approx(0.1 / 0.95**2),
        pytest.approx(0.01 / 0.95**2),
    ]
    optimizer.param_groups[1]["lr"] = 0.25
    take_step(model, optimizer)
    with pytest.raises(ValueError, match=r"one lr for all groups, got 0\.5 and 0\.25"):
        optimizer.update_damping(1.0, 0.5)
