"""KFAC: which parameters it preconditions, when, and what it says of the others."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torchium
from captured_layers import Scaled, UsedOutside
from optimizer_cases import ALL_CASES, assert_same, ignore_fallback, mlp, run, values
from torch import Tensor, nn


def train(model: nn.Module, optimizer, inputs, steps: int = 2) -> list[str]:
    """Some steps; the warnings of the optimizer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    return [str(w.message) for w in caught if "KFAC" in str(w.message)]


# ---- what falls back


class Tied(nn.Module):
    """A table that is also the weight of a linear layer."""

    def __init__(self):
        super().__init__()
        self.table, self.middle = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(self.middle(self.table(x)))


class TwoBiases(nn.Module):
    """A weight with a bias in each of its two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class TwoGroupings(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(2, 4, 1, bias=False)
        self.b = nn.Conv2d(4, 4, 1, groups=2, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x.view(-1, 2, 2, 1)))


class Attention(nn.Module):
    """It uses the weight of its output layer without running that."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        x = x.unsqueeze(1).expand(-1, 3, -1)
        return self.out(self.inner(x, x, x, need_weights=False)[0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.LSTM(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.inner(x)[0])


class FrozenWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.a.weight.requires_grad_(False)

    def forward(self, x):
        return self.b(self.a(x))


# model -> reasons of the parameters that fall back
FALLBACK = {
    "tied_embedding": (Tied, {"table.weight": "Embedding"}),
    "two_biases": (
        TwoBiases,
        dict.fromkeys(["a.bias", "b.bias"], "not the one bias of its weight"),
    ),
    "two_groupings": (TwoGroupings, {"a.weight": "used by convolutions of different groups"}),
    "used_outside": (
        UsedOutside,
        dict.fromkeys(["a.weight", "a.bias"], "also used outside of its layer"),
    ),
    "raw": (Scaled, {"scale": "Scaled"}),
    "attention": (
        Attention,
        {
            "inner.in_proj_weight": "MultiheadAttention",
            "inner.in_proj_bias": "MultiheadAttention",
            "inner.out_proj.weight": "not seen in use",
            "inner.out_proj.bias": "not seen in use",
        },
    ),
    "recurrent": (
        Recurrent,
        {f"inner.{n}_l0": "LSTM" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    ),
    "weight_norm": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3)
        ),
        {
            "0.parametrizations.weight.original0": "ParametrizationList",
            "0.parametrizations.weight.original1": "ParametrizationList",
            "0.bias": "its weight is not trained",
        },
    ),
    "frozen_weight": (FrozenWeight, {"a.bias": "its weight is not trained"}),
    "norms": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        {
            "1.weight": "LayerNorm",
            "1.bias": "LayerNorm",
            "2.weight": "BatchNorm1d",
            "2.bias": "BatchNorm1d",
        },
    ),
}


@pytest.mark.parametrize("kind", FALLBACK)
@pytest.mark.parametrize("form", ["model", "named_parameters"])
def test_other_parameters_take_sgd_steps_and_are_named_once(kind, form):
    torch.manual_seed(0)
    make, reasons = FALLBACK[kind]
    model = make()
    options = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}
    optimizer = torchium.KFAC(model if form == "model" else model.named_parameters(), **options)
    x = torch.randint(6, (5,)) if kind == "tied_embedding" else torch.randn(5, 4)

    names = {n for n, p in model.named_parameters() if p.requires_grad}
    fallback = {n: p for n, p in model.named_parameters() if n in reasons}
    by_hand = {n: p.detach().clone() for n, p in fallback.items()}
    sgd = torch.optim.SGD(by_hand.values(), **options)
    (message,) = train(model, optimizer, x, steps=1)
    for name, p in fallback.items():
        by_hand[name].grad = p.grad
    sgd.step()
    for name, p in fallback.items():
        torch.testing.assert_close(p.detach(), by_hand[name])

    assert dict(re.findall(r"([\w.]+) \(([^()]*)\)", message)) == reasons
    report = optimizer.report()
    assert set(report["fallback"]) == set(reasons)
    assert set(report["preconditioned"]) == names - set(reasons)
    assert len(report["preconditioned"]) + len(report["fallback"]) == len(names)
    assert train(model, optimizer, x, steps=12) == []
    for name, p in fallback.items():
        assert "A" not in optimizer.state[p], name


def test_no_warning_without_a_reason_for_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torchium.KFAC(model.parameters())
    assert optimizer.report() == {"preconditioned": [], "fallback": []}
    assert train(model, optimizer, torch.randn(5, 4)) == []
    names = [f"parameter {i} of group 0" for i in range(4)]
    assert optimizer.report() == {"preconditioned": names, "fallback": []}


def test_gradients_without_any_layer_are_told():
    """Else the optimizer of another model would be SGD in silence."""
    optimizer = torchium.KFAC(nn.Linear(3, 2).parameters())
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match=r"parameter 0 of group 0 \(in no module that has run\)"):
        optimizer.step()


@pytest.mark.parametrize("form", ["model", "parameters"])
def test_zero_gradients_without_any_layer_are_not(form):
    """As torch.distributed.checkpoint makes them to have state to load into."""
    model = nn.Linear(3, 2)
    optimizer = torchium.KFAC(model if form == "model" else model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert not train(nn.Identity(), optimizer, torch.ones(1, requires_grad=True), steps=1)


def test_a_late_use_outside_of_the_layer_is_the_users():
    """Looked for once: this documents what the first comparison cannot know."""
    model = UsedOutside()
    optimizer = torchium.KFAC(model)
    x = torch.randn(5, 4)
    model.b(model.a(x)).square().mean().backward()
    optimizer.step()
    assert train(model, optimizer, x) == []


# ---- when factors and inverses are due


class Counting:
    """What a step changes of the factors and inverses of a layer."""

    def __init__(self, optimizer, weight: Tensor) -> None:
        self.state = optimizer.state[weight]
        self.last: dict[str, Tensor] = {}

    def changed(self) -> set[str]:
        now = {key: self.state[key].clone() for key in ("A", "G", "A_inverse", "G_inverse")}
        changed = {
            k for k, v in now.items() if k not in self.last or not torch.equal(v, self.last[k])
        }
        self.last = now
        return changed


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def one_step(model, optimizer, step: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    optimizer.step()


def test_factors_and_inverses_change_when_they_are_due():
    model = layers()
    optimizer = torchium.KFAC(model, TCov=2, TInv=3)
    counting = Counting(optimizer, model[0].weight)
    for step in range(13):
        one_step(model, optimizer, step)
        due = {"A", "G"} if step % 2 == 0 else set()
        # Inverses are of the factors at that step; at step 9 those of step 8.
        due |= {"A_inverse", "G_inverse"} if step % 3 == 0 else set()
        assert counting.changed() == due, step
    assert optimizer.state[model[0].weight]["factor_updates"] == 7


def test_each_layer_counts_its_own_steps():
    model = layers()
    optimizer = torchium.KFAC(
        [{"params": model[0].parameters(), "TCov": 1}, {"params": model[2].parameters(), "TCov": 3}]
    )
    model[0].requires_grad_(False)
    for step in range(4):
        one_step(model, optimizer, step)
    model[0].requires_grad_(True)
    for step in range(4, 6):
        one_step(model, optimizer, step)
    assert optimizer.state[model[0].weight]["factor_updates"] == 2
    assert not torch.equal(optimizer.state[model[0].weight]["A_inverse"], torch.eye(5)[None])
    assert optimizer.state[model[2].weight]["factor_updates"] == 2


def test_nothing_is_captured_when_no_factors_are_due():
    model = layers()
    optimizer = torchium.KFAC(model, TCov=4)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        assert bool(optimizer._capture.sums) == (step % 4 == 0)
        optimizer.step()
        assert not optimizer._capture.sums


def test_an_inverse_that_is_missing_is_due_with_the_first_factors():
    """Here the layer is first used at a step at which no inverses would be due."""
    model = layers()
    optimizer = torchium.KFAC(model, TCov=1, TInv=100)
    for p in model[2].parameters():
        p.grad = torch.zeros_like(p)
    for step in range(3):  # steps of the last layer without a use of it
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        model[0](x).square().mean().backward()
        optimizer.step()
        model[0].zero_grad()
    weight = model[2].weight
    assert "A" not in optimizer.state[weight]
    assert optimizer.state[weight]["step"] == 3
    one_step(model, optimizer, 3)
    identity = torch.eye(5).expand_as(optimizer.state[weight]["A_inverse"])
    assert not torch.equal(optimizer.state[weight]["A_inverse"], identity)


@pytest.mark.parametrize("bias_first", [True, False])
def test_a_bias_that_is_frozen_or_unfrozen_in_mid_training(bias_first):
    """The factors keep their shape; the bias beside a smaller one takes SGD steps."""
    model = layers()
    model[0].bias.requires_grad_(bias_first)
    optimizer = torchium.KFAC(model, TCov=1, TInv=1)
    one_step(model, optimizer, 0)
    model[0].bias.requires_grad_(not bias_first)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if bias_first else "ignore")
        for step in range(1, 4):
            one_step(model, optimizer, step)
    assert optimizer.state[model[0].weight]["A"].shape == (1, *[4 + bias_first] * 2)
    assert optimizer.state[model[0].weight]["factor_updates"] == 4
    assert ("0.bias" in optimizer.report()["fallback"]) == (not bias_first)


# ---- copies and checkpoints of what is not in the state


@ignore_fallback
def test_a_checkpoint_loads_before_the_layers_are_known():
    model, other = mlp(), mlp()
    optimizer = ALL_CASES["kfac"](model.parameters())
    run(model, optimizer)
    other.load_state_dict(model.state_dict())
    loaded = ALL_CASES["kfac"](other.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    assert "A" in loaded.state[other[0].weight]
    expected = run(model, optimizer, 4, 5)
    assert_same(run(other, loaded, 4, 5), expected)
    assert loaded.report() == optimizer.report()
    assert_same(values(other), values(model))
