"""KFAC: the parameters that it preconditions, its schedule, and its reports on other parameters."""

from __future__ import annotations

import collections
import copy
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


class Words(nn.Module):
    """A table, a layer and a head; `tied`: with the table's weight."""

    def __init__(self, tied=True, **options):
        super().__init__()
        self.table, self.middle = nn.Embedding(6, 4, **options), nn.Linear(4, 4)
        self.out = nn.Linear(4, 6, bias=False)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(self.middle(self.table(x)))


class TwoBiases(nn.Module):
    """A weight with a different bias in each of its two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class ConvolvedBothWays(nn.Module):
    """An autoencoder with one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 2, 2, bias=False), nn.ConvTranspose1d(2, 1, 2, bias=False)
        self.b.weight = self.a.weight
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.b(torch.tanh(self.a(x[:, None])))[:, 0])


class TwoGroupings(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(2, 4, 1, bias=False)
        self.b = nn.Conv2d(4, 4, 1, groups=2, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x.view(-1, 2, 2, 1)))


class Attention(nn.Module):
    """It uses the weight of its output layer without calling that layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        x = x.unsqueeze(1).expand(-1, 3, -1)
        return self.out(self.inner(x, x.flip(1), x.flip(1), need_weights=False)[0])


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


class OwnNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = 1e-5

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * self.weight + self.bias


class LayerNorm(nn.LayerNorm):
    """One that replaces PyTorch's, and does more."""

    def forward(self, x):
        return super().forward(x).tanh()


# model -> reasons of the parameters that fall back
FALLBACK = {
    "counted_rows": (
        lambda: Words(tied=False, scale_grad_by_freq=True),
        {"table.weight": "Embedding has scale_grad_by_freq=True"},
    ),
    "tied_to_counted_rows": (
        lambda: Words(scale_grad_by_freq=True),
        {"table.weight": "tied to an Embedding that has scale_grad_by_freq=True"},
    ),
    "two_biases": (
        TwoBiases,
        dict.fromkeys(
            ["a.bias", "b.bias"],
            "not the one bias of its weight, or frozen when the factors of its weight were made",
        ),
    ),
    "two_groupings": (TwoGroupings, {"a.weight": "used by convolutions of different groups"}),
    "used_outside": (
        UsedOutside,
        dict.fromkeys(["a.weight", "a.bias"], "used outside of its layer"),
    ),
    "raw": (
        Scaled,
        {"scale": "a parameter of Scaled, used outside of a module that has factors"},
    ),
    "attention": (
        Attention,
        dict.fromkeys(["inner.in_proj_weight", "inner.in_proj_bias"], "used outside of its layer"),
    ),
    "recurrent": (
        Recurrent,
        dict.fromkeys(
            [f"inner.{n}_l0" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")],
            "LSTM has no Kronecker factors (its weights are not linear layers of modules)",
        ),
    ),
    "weight_norm": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3)
        ),
        {
            "0.parametrizations.weight.original0": "weight computed by WeightNorm",
            "0.parametrizations.weight.original1": "weight computed by WeightNorm",
            "0.bias": "weight computed by WeightNorm",
        },
    ),
    "weight_norm_by_a_hook": (
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3)),
        dict.fromkeys(["0.weight_g", "0.weight_v", "0.bias"], "weight computed by WeightNorm"),
    ),
    "spectral_norm": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            nn.utils.spectral_norm(nn.Linear(4, 3)),
        ),
        dict.fromkeys(
            ["0.parametrizations.weight.original", "0.bias", "1.weight_orig", "1.bias"],
            "weight computed by SpectralNorm",
        ),
    ),
    "transposed_convolution": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.ConvTranspose1d(2, 2, 2), nn.Flatten(), nn.Linear(6, 3)
        ),
        {"1.bias": "the bias of a transposed convolution, whose factors have no row for it"},
    ),
    "convolved_both_ways": (
        ConvolvedBothWays,
        dict.fromkeys(["a.weight"], "used by a convolution and by a transposed one"),
    ),
    "unknown_module": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 3)),
        {
            "1.weight": "PReLU has no Kronecker factors (it is not a linear layer, convolution, embedding or "
            "norm)"
        },
    ),
    "frozen_weight": (FrozenWeight, {"a.bias": "its weight is not trained"}),
    "own_forward": (
        lambda: nn.Sequential(nn.Linear(4, 4), LayerNorm(4), nn.Linear(4, 3)),
        dict.fromkeys(
            ["1.weight", "1.bias"],
            f"LayerNorm of {__name__} has a forward of its own, which may not be a linear layer",
        ),
    ),
    "other_norms": (
        lambda: nn.Sequential(nn.Linear(4, 4), OwnNorm(4), nn.LayerNorm(4), nn.Linear(4, 3)),
        dict.fromkeys(
            ["1.weight", "1.bias"],
            "a parameter of OwnNorm, used outside of a module that has factors",
        ),
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
    x = torch.randint(6, (5,)) if isinstance(model, Words) else torch.randn(5, 4)

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

    assert message.startswith(f"KFAC preconditions {len(names - set(reasons))} of {len(names)} ")
    kinds = {kind: int(count) for count, kind in re.findall(r"(\d+) \(([^:]*): ", message)}
    assert kinds == collections.Counter(reasons.values())
    report = optimizer.report()
    assert set(report["fallback"]) == set(reasons)
    assert set(report["preconditioned"]) == names - set(reasons)
    assert len(report["preconditioned"]) + len(report["fallback"]) == len(names)
    treatments = report["parameters"]
    assert {n: why for n, (kind, why) in treatments.items() if kind == "fallback"} == reasons
    assert {kind for n, (kind, _) in treatments.items() if n not in reasons} <= {
        "factors",
        "diagonal",  # of a tied head
        "unit-wise",
        "none",  # a frozen weight
    }
    assert train(model, optimizer, x, steps=12) == []
    for name, p in fallback.items():
        assert "A" not in optimizer.state[p], name


def test_no_warning_without_a_reason_for_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torchium.KFAC(model.parameters())
    names = [f"parameter {i} of group 0" for i in range(4)]
    nothing = {
        "preconditioned": [],
        "fallback": [],
        "diagonal_A": [],
        "diagonal_G": [],
        "graph_bytes": 0,
    }
    none = dict.fromkeys(names, ("none", "has taken no step"))
    assert optimizer.report() == {**nothing, "parameters": none}
    assert train(model, optimizer, torch.randn(5, 4)) == []
    details = ["A 5, G 4", f"A 5, G 4 of {names[0]}", "A 5, G 3", f"A 5, G 3 of {names[2]}"]
    done = {name: ("factors", detail) for name, detail in zip(names, details, strict=True)}
    assert optimizer.report() == {**nothing, "preconditioned": names, "parameters": done}


def test_the_report_names_groups_and_a_parameter_without_a_step():
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 3))
    model[2].bias.requires_grad_(False)
    optimizer = torchium.KFAC(model.named_parameters())
    train(model, optimizer, torch.randn(5, 4, 4, 4), steps=1)
    assert optimizer.report()["parameters"] == {
        "0.weight": ("factors", "2 groups with A 19, G 3"),
        "0.bias": ("factors", "2 groups with A 19, G 3 of 0.weight"),
        "2.weight": ("factors", "A 24, G 3"),
        "2.bias": ("none", "has taken no step"),
    }


def test_gradients_without_any_layer_are_told():
    """Otherwise the optimizer of another model would silently be SGD."""
    optimizer = torchium.KFAC(nn.Linear(3, 2).parameters())
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match="0 of 2 .*in no module that has run: parameter 0"):
        optimizer.step()


@pytest.mark.parametrize("form", ["model", "parameters"])
def test_zero_gradients_without_any_layer_are_not(form):
    """As torch.distributed.checkpoint sets them to create state before loading."""
    model = nn.Linear(3, 2)
    optimizer = torchium.KFAC(model if form == "model" else model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert not train(nn.Identity(), optimizer, torch.ones(1, requires_grad=True), steps=1)


def test_a_late_use_outside_of_the_layer_is_the_users():
    """Checked once: this documents what the first comparison cannot detect."""
    model = UsedOutside()
    optimizer = torchium.KFAC(model)
    x = torch.randn(5, 4)
    model.b(model.a(x)).square().mean().backward()
    optimizer.step()
    assert train(model, optimizer, x) == []


# ---- when factors and inverses are due


class Counting:
    """A step's changes of a layer's factors and inverses."""

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
        # Inverses use the factors at that step; at step 9 those of step 8.
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
        assert bool(optimizer._plan.core.recorded()) == (step % 4 == 0)
        optimizer.step()
        assert not optimizer._plan.core.recorded()


def test_an_inverse_that_is_missing_is_due_with_the_first_factors():
    """Here the layer is first called at a step without inverses due."""
    model = layers()
    optimizer = torchium.KFAC(model, TCov=1, TInv=100)
    for p in model[2].parameters():
        p.grad = torch.zeros_like(p)
    for step in range(3):  # steps without a call of the last layer
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
    """The factors keep their shape; a bias without a column in them takes SGD steps."""
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


# ---- copies and checkpoints of data outside the state


@ignore_fallback
def test_a_checkpoint_loads_before_the_layers_are_known():
    model, other = mlp(), mlp()
    optimizer = ALL_CASES["kfac"](model.parameters())
    run(model, optimizer)
    other.load_state_dict(model.state_dict())
    loaded = ALL_CASES["kfac"](other.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    assert "A" in loaded.state[other[0].weight]
    none = ("none", "has taken no step since its state was loaded or copied")
    assert set(loaded.report()["parameters"].values()) == {none}
    expected = run(model, optimizer, 4, 5)
    assert_same(run(other, loaded, 4, 5), expected)
    assert loaded.report() == optimizer.report()
    assert_same(values(other), values(model))


# ---- messages and large factors


def test_the_warning_about_many_parameters_is_short_and_begins_with_their_number():
    norms = {f"a_rather_long_name_of_a_stage_{i}": OwnNorm(4) for i in range(60)}
    model = nn.Sequential(collections.OrderedDict({**norms, "table": nn.PReLU()}))
    optimizer = torchium.KFAC(model)
    (message,) = train(model, optimizer, torch.randn(5, 4))
    assert message.startswith("KFAC preconditions 0 of 121 parameters")
    assert "120 (a parameter of OwnNorm, used outside of a module that has factors: " in message
    assert "1 (PReLU has no Kronecker factors " in message
    assert len(message) < 1000
    assert len(optimizer.report()["fallback"]) == 121


def test_a_wide_layer_keeps_diagonals_and_says_so():
    """The matrix would have 600,001^2 entries: 1.4 TB."""
    model = nn.Sequential(nn.Linear(600_000, 2), nn.Linear(2, 3))
    optimizer = torchium.KFAC(model)
    (message,) = train(model, optimizer, torch.randn(4, 600_000), steps=2)
    assert "max_factor_size" in message
    assert "0.weight (600001)" in message
    state = optimizer.state[model[0].weight]
    assert state["A"].shape == state["A_inverse"].shape == (1, 600_001)
    assert state["G"].shape == (1, 2, 2)
    report = optimizer.report()
    assert report["diagonal_A"] == ["0.weight"]
    assert report["diagonal_G"] == []
    assert report["parameters"]["0.weight"] == ("diagonal", "the diagonal of A 600001, G 2")


@pytest.mark.parametrize("split", ["pi", "exact"])
def test_diagonal_factors_go_through_checkpoints(split):
    torch.manual_seed(0)
    options = {"lr": 0.1, "TCov": 1, "max_factor_size": 4, "damping_split": split}
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4)
    optimizer = torchium.KFAC(model, **options)
    train(model, optimizer, x)
    other = copy.deepcopy(model)
    loaded = torchium.KFAC(other, **{**options, "max_factor_size": 100})
    loaded.load_state_dict(optimizer.state_dict())
    for m, o in ((model, optimizer), (other, loaded)):
        train(m, o, x)
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=0)
    broken = optimizer.state_dict()
    broken["state"][0]["A"] = torch.zeros(1, 7)
    with pytest.raises(ValueError, match=r"'A' of .*\[1, 7\]"):
        loaded.load_state_dict(broken)


# ---- transformers


def test_gpt2_is_preconditioned_but_for_its_positions():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    optimizer = torchium.KFAC(model)
    x = torch.arange(64).reshape(4, 16) % 7
    losses, messages = [], []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        messages += [str(w.message) for w in caught]
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    why = "looked up for positions that samples share"
    assert f"1 ({why}: transformer.wpe.weight)" in messages[0]
    layers = {name for name in optimizer.report()["preconditioned"]}
    assert layers == {
        f"transformer.{name}" for name in ("wte.weight", "ln_f.weight", "ln_f.bias")
    } | {
        f"transformer.h.{block}.{layer}.{name}"
        for block in range(2)
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")
        for name in ("weight", "bias")
    }


def small_model() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train_small(model: nn.Module, optimizer: torchium.KFAC, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (7,), generator=generator)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def replace_the_first_weight(late: bool) -> list[Tensor]:
    model = small_model()
    optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=1, kl_clip=None, momentum=0.0)
    train_small(model, optimizer, 2)
    weight = nn.Parameter(model[0].weight.detach().clone())
    model[0].weight = weight
    if late:
        train_small(model, optimizer, 1)
    optimizer.add_param_group({"params": [("new", weight)]})
    train_small(model, optimizer, 4)
    optimizer.check_errors()
    A = optimizer.state[weight]["A"]
    assert A.shape == (1, 5, 5)
    assert A.isfinite().all()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("late", [False, True])
def test_a_weight_that_replaces_another_gets_factors_of_the_whole_layer(late):
    """The bias was joint with the weight before."""
    first, *others = (replace_the_first_weight(late) for _ in range(10))
    for other in others:
        assert_same(other, first)


def test_a_weight_that_is_parametrized_in_mid_run_falls_back():
    model = small_model()
    optimizer = torchium.KFAC(model, TCov=1, TInv=1)
    train_small(model, optimizer, 1)
    assert optimizer.report()["parameters"]["0.weight"][0] == "factors"
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    train_small(model, optimizer, 2)
    assert optimizer.report()["parameters"]["0.weight"][0] == "fallback"


def test_a_weight_whose_parametrization_was_removed_has_factors_again():
    model = small_model()
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    optimizer = torchium.KFAC(model, TCov=1, TInv=1)
    with pytest.warns(UserWarning, match="weight computed by Identity"):
        train_small(model, optimizer, 1)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    fresh_model = copy.deepcopy(model)
    fresh = torchium.KFAC(fresh_model, TCov=1, TInv=1)
    train_small(model, optimizer, 1)
    train_small(fresh_model, fresh, 1)
    report = optimizer.report()["parameters"]
    assert {treatment for treatment, _ in report.values()} == {"factors"}
    for factor in ("A", "G"):
        assert_same(
            optimizer.state[model[0].weight][factor], fresh.state[fresh_model[0].weight][factor]
        )


def test_options_that_change_between_forward_pass_and_step_lose_no_factors():
    model = small_model()
    optimizer = torchium.KFAC(
        model, lr=0.1, momentum=0.0, kl_clip=None, adaptive_damping=True, TCov=1
    )
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 3
    last = None
    for step in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.param_groups[0]["stat_decay"] = 0.9 - 0.01 * step
        if last is not None:
            optimizer.update_damping(last, loss)
        loss.backward()
        optimizer.step()
        last = loss.detach()
    assert optimizer.state[model[0].weight]["factor_updates"] == 5
