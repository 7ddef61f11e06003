"""factor_dtype of torchium.KFAC: how A and G are stored."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torchium
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
SPLITS = ["pi", "exact"]


def network(dtype: torch.dtype, device: Any) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)
        )
    return model.to(device, dtype)


def batch(step: int, dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 2, 3, 3, generator=generator)
    return x.to(device, dtype), (torch.arange(24, device=device) + step) % 3


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, device: Any
) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        x, y = batch(step, dtype, device)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def layers(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [state for state in optimizer.state.values() if "A" in state]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor_dtype", [None, *DTYPES, "bfloat16"])
def test_only_the_factors_have_the_dtype(factor_dtype, dtype, split, device):
    model = network(dtype, device)
    optimizer = torchium.KFAC(model, factor_dtype=factor_dtype, damping_split=split, TCov=1, TInv=2)
    train(model, optimizer, 0, 4, device)
    of_state = torch.float64 if dtype == torch.float64 else torch.float32
    expected = of_state if factor_dtype is None else factor_dtype
    expected = torch.bfloat16 if expected == "bfloat16" else expected
    assert len(layers(optimizer)) == 3
    for state in layers(optimizer):
        assert {state[key].dtype for key in ("A", "G")} == {expected}
        roots = [v for k, v in state.items() if k.endswith(("inverse", "vectors", "values"))]
        assert {root.dtype for root in roots} == {of_state}
        assert state["root_failures"].tolist() == [0, 0]
        assert state["factor_updates"] == 4
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_differ_by_the_rounding_of_the_dtype(dtype, device):
    """Every average is rounded once: within half a unit in the last place of each, of all so far."""
    results = []
    for factor_dtype in (torch.float64, dtype):
        model = network(torch.float64, device)
        options = {"TCov": 1, "TInv": 100, "stat_decay": 0.5}
        optimizer = torchium.KFAC(model, lr=0.0, factor_dtype=factor_dtype, **options)
        train(model, optimizer, 0, 6, device)
        results.append([state[key].double() for state in layers(optimizer) for key in ("A", "G")])
    for exact, rounded in zip(*results, strict=True):
        largest = exact.abs().amax()
        assert (rounded - exact).abs().amax() <= 1.5 * torch.finfo(dtype).eps * largest
        assert torch.equal(rounded, rounded.mT)
        assert torch.equal(rounded, exact) == (dtype == torch.float64)


@pytest.mark.parametrize("solver", ["auto", "eigh", "cholesky", "newton"])
@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float64])
def test_inverses_are_those_of_the_stored_factors(factor_dtype, solver, device):
    """Solves in float64 resolve what float32 does not."""
    damping = 1e-8 if factor_dtype == torch.float64 else 1e-2
    model = nn.Linear(12, 4, bias=False).to(device)
    options = {"damping_split": "plain", "damping": damping, "solver": solver}
    optimizer = torchium.KFAC(model, lr=0.1, factor_dtype=factor_dtype, **options)
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(0)).to(device)
    F.cross_entropy(model(x), torch.arange(64, device=device) % 4).backward()
    optimizer.step()
    (state,) = layers(optimizer)
    for key in ("A", "G"):
        values, vectors = torch.linalg.eigh(state[key][0].double())
        if solver == "eigh":  # counts negative eigenvalues, which rounding makes of zeros, as zero
            values = values.clamp_min(0)
        exact = vectors / (values + math.sqrt(damping)) @ vectors.mT
        error = (state[f"{key}_inverse"][0].double() - exact).norm() / exact.norm()
        assert error <= (1e-6 if factor_dtype == torch.float64 else 1e-4)


def test_bfloat16_halves_the_memory_of_the_factors():
    sizes = []
    for factor_dtype in (None, torch.bfloat16):
        model = network(torch.float32, "cpu")
        optimizer = torchium.KFAC(model, factor_dtype=factor_dtype)
        train(model, optimizer, 0, 1, "cpu")
        sizes.append(sum(state[key].nbytes for state in layers(optimizer) for key in ("A", "G")))
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize("split", SPLITS)
def test_training_with_bfloat16_factors_stays_near(split, device):
    """At every step within 1 % of the initial loss."""
    curves = []
    for factor_dtype in (None, torch.bfloat16):
        model = network(torch.float32, device)
        options = {"TCov": 1, "TInv": 2, "damping_split": split, "lr": 0.02}
        optimizer = torchium.KFAC(model, factor_dtype=factor_dtype, **options)
        x, y = batch(0, torch.float32, device)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    of_float32, of_bfloat16 = curves
    assert of_float32 != of_bfloat16
    assert of_float32[-1] < 0.3 * of_float32[0]
    assert of_bfloat16 == pytest.approx(of_float32, rel=0, abs=0.01 * of_float32[0])


@pytest.mark.parametrize("first", [None, *DTYPES])
@pytest.mark.parametrize("second", [None, *DTYPES])
def test_a_new_value_converts_the_factors(first, second, device):
    model = network(torch.float32, device)
    optimizer = torchium.KFAC(model, factor_dtype=first, TCov=1, TInv=2)
    train(model, optimizer, 0, 3, device)
    before = [state[key].clone() for state in layers(optimizer) for key in ("A", "G")]
    optimizer.param_groups[0]["factor_dtype"] = second
    optimizer.param_groups[0]["TCov"] = 100
    train(model, optimizer, 3, 4, device)
    after = [state[key] for state in layers(optimizer) for key in ("A", "G")]
    wanted = torch.float32 if second is None else second
    for old, new in zip(before, after, strict=True):
        assert new.dtype == wanted
        assert torch.equal(old.to(wanted), new)
    train(model, optimizer, 4, 6, device)


@pytest.mark.parametrize("loading", [None, *DTYPES])
def test_a_checkpoint_brings_its_dtype(loading, device):
    """The option is in the checkpoint; one without it is converted to the dtype of the optimizer."""
    model = network(torch.float32, device)
    optimizer = torchium.KFAC(model, factor_dtype=torch.bfloat16, TCov=1, TInv=2)
    train(model, optimizer, 0, 3, device)
    saved = copy.deepcopy(optimizer.state_dict())
    without = copy.deepcopy(saved)
    del without["param_groups"][0]["factor_dtype"]

    other, converted_model = network(torch.float32, device), network(torch.float32, device)
    for each in (other, converted_model):
        each.load_state_dict(model.state_dict())
    resumed = torchium.KFAC(other, factor_dtype=loading)
    resumed.load_state_dict(saved)
    train(other, resumed, 3, 6, device)
    converted = torchium.KFAC(converted_model, factor_dtype=loading)
    converted.load_state_dict(without)
    wanted = torch.float32 if loading is None else loading
    assert {s["A"].dtype for s in layers(converted)} == {wanted}
    train(converted_model, converted, 3, 4, device)

    train(model, optimizer, 3, 6, device)
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=0)
    assert {s["A"].dtype for s in layers(resumed)} == {torch.bfloat16}
    assert {s["A"].dtype for s in layers(converted)} == {wanted}


@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float32])
def test_sums_too_large_for_the_factors_skip_the_step(factor_dtype, device):
    layer = nn.Linear(2, 2, bias=False).double().to(device)
    optimizer = torchium.KFAC(layer, lr=0.1, factor_dtype=factor_dtype, TCov=1)
    for size in (1.0, 1e25, 1.0):
        optimizer.zero_grad()
        layer(torch.full((2, 2), size, dtype=torch.float64, device=device)).sum().backward()
        optimizer.step()
    (state,) = layers(optimizer)
    assert state["step"] == 2
    assert all(value.isfinite().all() for value in state.values())
