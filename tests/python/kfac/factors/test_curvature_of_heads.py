"""update_curvature() for several outputs of one forward pass, and for outputs of several rows per sample."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from kfac_problems import assert_close_in_norm, random
from optimizer_cases import ignore_fallback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchium import KFAC, NaturalGradient

pytestmark = ignore_fallback

SAMPLES, TOKENS = 6, 3


class Heads(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 5)
        self.classes, self.values = nn.Linear(5, 3), nn.Linear(5, 2)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh()
        return self.classes(h), self.values(h)


def loss_of(logits: Tensor, values: Tensor, weight: float = 1.0) -> Tensor:
    return logits.square().sum() / SAMPLES + weight * values.square().sum() / SAMPLES


def roots(logits: Tensor, values: Tensor, weight: float = 1.0) -> list[Tensor]:
    """Columns of the Hessians of cross-entropy and of the weighted sum of squares."""
    p = logits.detach().softmax(-1)
    unit = torch.eye(3, dtype=p.dtype, device=p.device)
    columns = [p[..., c, None].sqrt() * (unit[c] - p) for c in range(3)]
    return columns + [
        (2 * weight) ** 0.5 * F.one_hot(torch.full(values.shape[:-1], c), 2).to(values)
        for c in range(2)
    ]


def record(optimizer: Any, logits: Tensor, values: Tensor, weight: float = 1.0) -> None:
    optimizer.update_curvature(logits, "cross_entropy", reduction="sum")
    values = values.detach().lerp(values, weight**0.5)
    optimizer.update_curvature(values, "mse", reduction="sum")


def rows_of(model: Heads, x: Tensor, output: int, column: Tensor, i: int) -> Tensor:
    found = torch.autograd.grad(
        (model(x)[output] * column)[i].sum(), list(model.parameters()), allow_unused=True
    )
    pairs = zip(model.parameters(), found, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs])


def gauss_newton_step(model: Heads, x: Tensor, damping: float, weight: float = 1.0) -> Tensor:
    columns = roots(*model(x), weight)
    S = torch.stack(
        [rows_of(model, x, int(k >= 3), v, i) for k, v in enumerate(columns) for i in range(len(x))]
    )
    gradient = torch.autograd.grad(loss_of(*model(x), weight), list(model.parameters()))
    v = torch.cat([g.flatten() for g in gradient])
    return torch.linalg.solve(S.T @ S / len(x) + damping * torch.eye(len(v)).to(v), v)


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("parts", [1, 2])
def test_natural_gradient_adds_up_the_curvatures_of_heads(parts, weight, device):
    model, x = Heads().to(device), random(SAMPLES, 4, seed=1).to(device)
    expected = gauss_newton_step(model, x, 0.1, weight)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = NaturalGradient(model, lr=1.0, damping=0.1, momentum=0, fisher="ggn")
    for part in x.chunk(parts):
        logits, values = model(part)
        record(optimizer, logits, values, weight)
        loss_of(logits, values, weight).backward()
    optimizer.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert_close_in_norm(before - after, expected, 1e-10)
    assert optimizer.report()["samples"] == SAMPLES


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("ekfac", [False, True])
def test_kfac_adds_up_the_curvatures_of_heads(ekfac, parts, weight, device):
    model, x = Heads().to(device), random(SAMPLES, 4, seed=1).to(device)
    options: dict[str, Any] = {"damping_split": "exact", "ekfac": True} if ekfac else {}
    optimizer = KFAC(model, lr=0.0, fisher="ggn", TCov=1, TInv=1, **options)
    for _ in range(1 + ekfac):  # moments begin with the second step
        optimizer.zero_grad()
        for part in x.chunk(parts):
            logits, values = model(part)
            record(optimizer, logits, values, weight)
            loss_of(logits, values, weight).backward()
        optimizer.step()
    h = model.trunk(x)
    logits, values = model.classes(h.tanh()), model.values(h.tanh())
    outputs = [logits] * 3 + [values] * 2
    gradients = [
        torch.autograd.grad(f, h, v, retain_graph=True)[0]
        for f, v in zip(outputs, roots(logits, values, weight), strict=True)
    ]
    G = sum(g.T @ g for g in gradients) / SAMPLES
    a = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    state = optimizer.state[model.trunk.weight]
    assert_close_in_norm(state["G"][0], G, 1e-10)
    assert_close_in_norm(state["A"][0], a.T @ a / SAMPLES, 1e-10)
    p = logits.detach().softmax(-1)
    of_classes = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0)
    assert_close_in_norm(optimizer.state[model.classes.weight]["G"][0], of_classes, 1e-10)
    of_values = 2 * weight * torch.eye(2).to(p)
    assert_close_in_norm(optimizer.state[model.values.weight]["G"][0], of_values, 1e-10)
    if ekfac:
        U_A, U_G = state["A_eigenvectors"][0], state["G_eigenvectors"][0]
        moments = sum((g @ U_G).square().T @ (a @ U_A).square() for g in gradients) / SAMPLES
        assert_close_in_norm(state["second_moments"][0], moments, 1e-10)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce"])
def test_a_weight_scales_sampled_curvatures(loss):
    model, x = Heads(), random(SAMPLES, 4, seed=1)
    factors = []
    for weight in (1.0, 0.3):
        torch.manual_seed(5)
        optimizer = KFAC(model, lr=0.0, fisher="mc", TCov=1, TInv=1)
        logits, _ = model(x)
        optimizer.update_curvature(logits.detach().lerp(logits, weight**0.5), loss)
        logits.sum().backward()
        optimizer.step()
        factors.append(optimizer.state[model.trunk.weight]["G"])
    assert_close_in_norm(factors[1], 0.3 * factors[0], 1e-10)


def test_heads_may_count_other_samples(device):
    """The loss is a mean over the samples of one head and over the tokens of the other."""
    x = random(SAMPLES, TOKENS, 4, seed=1).to(device)
    results = []
    for flattened in (False, True):
        torch.manual_seed(0)
        trunk = nn.Linear(4, 5).double().to(device)
        optimizer = KFAC(trunk, lr=0.0, fisher="ggn", TCov=1, TInv=1)
        h = trunk(x)
        optimizer.update_curvature(h.mean(1).tanh(), "mse")
        if flattened:
            optimizer.update_curvature(h.flatten(0, 1), "cross_entropy")
        else:
            optimizer.update_curvature(h, "cross_entropy", class_dim=-1)
        h.square().mean().backward()
        optimizer.step()
        results.append(optimizer.state[trunk.weight])
    for name in ("A", "G"):
        assert_close_in_norm(results[1][name], results[0][name], 1e-10)


def step_with_one_curvature(optimizer: Any, model: Heads) -> None:
    optimizer.zero_grad()
    logits, values = model(random(SAMPLES, 4, seed=1))
    optimizer.update_curvature(logits, "cross_entropy")
    loss_of(logits, values).backward()
    optimizer.step()


@pytest.mark.parametrize("fisher", ["ggn", "mc"])
def test_kfac_names_the_head_without_a_curvature(fisher):
    model = Heads()
    optimizer = KFAC(model, fisher=fisher)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_with_one_curvature(optimizer, model)
        step_with_one_curvature(optimizer, model)
    (text,) = [str(each.message) for each in caught]
    assert "2 (no update_curvature() covers its outputs: values.weight, values.bias)" in text
    assert "give each one that the loss uses an update_curvature(outputs, loss)" in text
    for name in ("values.weight", "values.bias"):
        detail = optimizer.report()["parameters"][name]
        assert detail == ("fallback", "no update_curvature() covers its outputs")


@pytest.mark.parametrize("only", [False, True])
def test_natural_gradient_names_the_head_without_a_curvature(only):
    """Also if no layer has a curvature and a gradient."""
    model = Heads()
    model.trunk.requires_grad_(not only)
    optimizer = NaturalGradient(model, fisher="mc")
    logits, values = model(random(SAMPLES, 4, seed=1))
    optimizer.update_curvature(logits, "cross_entropy")
    (values.sum() if only else loss_of(logits, values)).backward()
    message = (
        r"gradient of parameter 'values.weight'.* comes from an output of the model that no "
        r"update_curvature\(\) covers; call update_curvature\(outputs, loss\) for each output"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.step()


@pytest.mark.parametrize("kind", [KFAC, NaturalGradient])
def test_checkpoints_that_curvatures_do_not_reach_are_named(kind):
    model = Heads()
    optimizer = kind(model, fisher="mc")
    h = checkpoint(model.trunk, random(SAMPLES, 4, seed=1).requires_grad_(), use_reentrant=True)
    logits, values = model.classes(h), model.values(h)
    record(optimizer, logits, values)
    loss_of(logits, values).backward()
    message = "torch.utils.checkpoint with use_reentrant=True"
    if kind is KFAC:
        with pytest.warns(UserWarning, match=message):
            optimizer.step()
    else:
        with pytest.raises(ValueError, match=message):
            optimizer.step()


def sequence_model(device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(device)
    return model, model(random(SAMPLES, TOKENS, 4, seed=1).to(device)).flatten(0, 1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (NaturalGradient, {}),
        (KFAC, {"weight_sharing": "reduce"}),
        (KFAC, {"ekfac": True, "damping_split": "exact"}),
    ],
)
def test_rows_of_several_outputs_are_refused(kind, options, device):
    """A column of "ggn" for the tokens of a sample together has cross terms, which mean nothing."""
    model, _ = sequence_model(device)
    optimizer = kind(model, fisher="ggn", **options)
    outputs = model(random(SAMPLES, TOKENS, 4, seed=1).to(device)).flatten(0, 1)
    message = rf"outputs \[18, 3\] have 18 samples, but .* has seen {SAMPLES} in dim.*fisher='mc'"
    with pytest.raises(ValueError, match=message):
        optimizer.update_curvature(outputs, "cross_entropy")
    optimizer = kind(model, fisher="mc", **options)
    outputs = model(random(SAMPLES, TOKENS, 4, seed=1).to(device)).flatten(0, 1)
    optimizer.update_curvature(outputs, "cross_entropy")
    outputs.square().mean().backward()
    optimizer.step()


def test_more_rows_than_outputs_are_no_samples(device):
    """Windows of a sample, of which each had a row of its own."""
    model = nn.Linear(4, 3).double().to(device)
    for fisher in ("ggn", "mc"):
        optimizer = NaturalGradient(model, fisher=fisher)
        outputs = model(random(SAMPLES * TOKENS, 4, seed=1).to(device)).unflatten(0, (SAMPLES, -1))
        with pytest.raises(ValueError, match=r"has seen 18 samples .* and outputs \[6, 3\] have 6"):
            optimizer.update_curvature(outputs.mean(1), "mse")
