"""Training goes on as it should after a step has raised and its cause is gone."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torchium
from optimizer_cases import ALL_CASES, CAPTURING_CASES, assert_same, values
from torch import nn
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode


class RaisesAt(TorchDispatchMode):
    """Raises instead of operators whose names have one of these parts."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        self.parts = parts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(part in str(func) for part in self.parts):
            raise torch.OutOfMemoryError("a test")
        return func(*args, **(kwargs or {}))


def layer_and_inputs() -> tuple[nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return layer, torch.randn(16, 4, generator=generator)


def backward(model, optimizer, inputs, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(inputs).square().mean() * scale).backward()


def damped_inverse(factor: torch.Tensor, damping: float) -> torch.Tensor:
    factor = factor.double().view(factor.shape[-2:])
    return torch.linalg.inv(factor + damping**0.5 * torch.eye(len(factor), dtype=torch.double))


@pytest.mark.parametrize("split", ["pi", "exact"])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_inversion_that_raised_is_made_up_for(split, transposed):
    layer, inputs = layer_and_inputs()
    if transposed:
        transformers = pytest.importorskip("transformers")
        layer = transformers.pytorch_utils.Conv1D(3, 4)
    optimizer = torchium.KFAC(layer, damping_split=split, TInv=100)
    backward(layer, optimizer, inputs)
    with pytest.raises(torch.OutOfMemoryError), RaisesAt("cholesky", "eigh"):
        optimizer.step()
    backward(layer, optimizer, inputs)
    optimizer.step()
    state = optimizer.state[layer.weight]
    root = state["A_inverse" if split == "pi" else "A_eigenvectors"]
    assert not torch.equal(root, torch.eye(5).expand_as(root))


def test_another_split_of_the_damping_gets_its_inverses_at_once():
    layer, inputs = layer_and_inputs()
    optimizer = torchium.KFAC(layer, damping_split="pi", damping=0.09, TCov=1, TInv=100)
    backward(layer, optimizer, inputs)
    optimizer.step()
    state = optimizer.state[layer.weight]
    factors = {key: state[key].clone() for key in "AG"}
    optimizer.param_groups[0]["damping_split"] = "plain"
    backward(layer, optimizer, inputs)
    optimizer.step()  # the factors of this step come later
    for key, factor in factors.items():
        expected = damped_inverse(factor, 0.09)
        actual = state[f"{key}_inverse"].double().view_as(expected)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["shampoo", "adagrad_full", *CAPTURING_CASES])
def test_a_step_that_raises_under_a_scaler_leaves_scaled_gradients(name, monkeypatch):
    layer, inputs = layer_and_inputs()
    optimizer = ALL_CASES[name](layer.parameters())
    scaler = GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale(layer(inputs).square().mean()).backward()
    before = [p.grad.clone() for p in layer.parameters()]
    mode = RaisesAt("aten.sqrt", "aten.addcmul", "aten.lerp", "mm", "aten.linalg")
    step = optimizer.step

    def step_that_raises() -> None:
        with mode:
            step()

    monkeypatch.setattr(optimizer, "step", step_that_raises)
    with pytest.raises(torch.OutOfMemoryError):
        scaler.step(optimizer)
    assert_same([p.grad for p in layer.parameters()], before)


@pytest.mark.parametrize("name", CAPTURING_CASES)
def test_a_wrong_option_leaves_what_was_captured(name):
    results = []
    for is_wrong in (False, True):
        layer, inputs = layer_and_inputs()
        optimizer = CAPTURING_CASES[name](layer.parameters())
        backward(layer, optimizer, inputs)
        if is_wrong:
            good = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = -1.0
            with pytest.raises(ValueError, match="lr"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = good
        optimizer.step()
        results.append([values(layer), optimizer.state_dict()["state"]])
    assert_same(*results)


@pytest.mark.parametrize("optimizer_forgets", [True, False])
@pytest.mark.parametrize("name", CAPTURING_CASES)
def test_an_option_that_was_wrong_during_the_forward_pass_costs_that_pass_alone(
    name, optimizer_forgets
):
    results = []
    for is_wrong in (False, True):
        layer, inputs = layer_and_inputs()
        optimizer = CAPTURING_CASES[name](layer.parameters())
        if is_wrong:
            good = optimizer.param_groups[0]["damping"]
            optimizer.param_groups[0]["damping"] = -1.0
            backward(layer, optimizer, inputs)
            with pytest.raises(ValueError, match="damping"):
                optimizer.step()
            optimizer.param_groups[0]["damping"] = good
        for _ in range(2):
            (optimizer if optimizer_forgets else layer).zero_grad()
            layer(inputs).square().mean().backward()
            optimizer.step()
        results.append([values(layer), optimizer.state_dict()["state"]])
    assert_same(*results)


@pytest.mark.parametrize("name", CAPTURING_CASES)
def test_a_group_that_joins_after_a_forward_pass_is_captured_from_its_first_step_on(name):
    results = []
    for evaluates in (False, True):
        layer, inputs = layer_and_inputs()
        optimizer = CAPTURING_CASES[name](layer.parameters())
        backward(layer, optimizer, inputs)
        optimizer.step()
        if evaluates:
            layer(inputs)  # decides what the next step needs
        head = nn.Linear(3, 3)
        head.load_state_dict({"weight": torch.eye(3), "bias": torch.zeros(3)})
        optimizer.add_param_group({"params": head.parameters()})
        model = nn.Sequential(layer, head)
        for _ in range(2):
            model.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        results.append([values(model), optimizer.state_dict()["state"]])
    assert_same(*results)


@pytest.mark.parametrize("name", CAPTURING_CASES)
@pytest.mark.filterwarnings("ignore:KFAC preconditions 0 of 2 parameters")
def test_a_parameter_that_replaces_another_in_its_group_is_captured_from_the_next_step_on(name):
    layer, inputs = layer_and_inputs()
    optimizer = CAPTURING_CASES[name]([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][:] = layer.parameters()
    backward(layer, optimizer, inputs)
    with contextlib.suppress(ValueError):  # natural gradient's: nothing was captured
        optimizer.step()
    for _ in range(2):
        backward(layer, optimizer, inputs)
        optimizer.step()
    if isinstance(optimizer, torchium.KFAC):
        assert {"A", "K"} & optimizer.state[layer.weight].keys()  # K: solver="inverse_free"
