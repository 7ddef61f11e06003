"""Rows of torchium.per_sample_gradients that are written during the backward pass."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchium
from captured_layers import MODELS, loss_fn, model_and_batch
from optimizer_cases import assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from torchium._per_sample import layers as implementation

Rows = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def early(monkeypatch) -> Callable[..., tuple[Rows, list[int]]]:
    """The rows, most of them early, and how many parameters each operator saw."""
    seen: list[int] = []
    run = implementation.LayerCalls.run

    def watched_run(calls: Any, *args: Any, **options: Any) -> Any:
        seen.append(len(calls.params))
        return run(calls, *args, **options)

    def rows(*args: Any, **options: Any) -> tuple[Rows, list[int]]:
        seen.clear()
        with monkeypatch.context() as patched:
            patched.setattr(implementation.LayerCalls, "run", watched_run)
            patched.setattr(implementation, "_has_large_rows", lambda params, call: True)
            return torchium.per_sample_gradients(*args, **options), list(seen)

    return rows


def mlp(device: torch.device | str = "cpu") -> tuple[nn.Sequential, Tensor, Tensor]:
    """Three layers: the operators see the parameters of the last, the second and the first one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)
    )
    return model.to(device), torch.randn(6, 4, device=device), torch.arange(6, device=device) % 3


@pytest.mark.parametrize("max_workspace_bytes", [1, 2**28])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"two_tables"}))
def test_early_rows_are_the_same_bits(name, max_workspace_bytes, device, early):
    model, batch = model_and_batch(name, device=device)
    options = {"max_workspace_bytes": max_workspace_bytes}
    expected = torchium.per_sample_gradients(model, loss_fn, *batch, **options)
    rows, seen = early(model, loss_fn, *batch, **options)
    assert list(rows) == list(expected)
    if name == "upsampling" and torch.device(device).type == "cuda":
        torch.testing.assert_close(rows, expected)  # its backward pass adds in any order
    else:
        assert_same(rows, expected)
    assert len(seen) > 1
    assert sum(seen) == len(expected)


def test_each_layer_but_the_first_has_an_operator_in_the_backward_pass(device, early):
    model, x, y = mlp(device)
    expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    with torch.no_grad():
        rows, seen = early(model, F.cross_entropy, x, y)
    assert_same(rows, expected)
    assert seen == [2, 1, 2]


@pytest.mark.parametrize(("frozen", "operators"), [(0, [2, 1]), (2, [2, 2]), (4, [1, 2])])
def test_frozen_layers(frozen, operators, early):
    model, x, y = mlp()
    model[frozen].requires_grad_(False)
    expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    rows, seen = early(model, F.cross_entropy, x, y)
    assert_same(rows, expected)
    assert seen == operators


def test_parameters_of_several_calls_are_written_late(early):
    """A layer called twice, and two layers with the same weight."""
    x, y = torch.randn(6, 4), torch.arange(6) % 4
    twice = nn.Linear(4, 4)
    tied = nn.Linear(4, 4)
    other = nn.Linear(4, 4)
    other.weight = tied.weight
    layers = [nn.Linear(4, 4), twice, tied, twice, other, nn.Linear(4, 4)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh())))
    expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    rows, seen = early(model, F.cross_entropy, x, y)
    assert_same(rows, expected)
    assert seen == [2, len(expected) - 2]


class Branches(nn.Module):
    """Outputs used twice, two branches, and one that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.out, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b, c = self.b(a), self.c(a.sin())
        self.unused(b)
        return self.out(b.cos() * c + b * c.tanh())


def test_outputs_that_are_used_twice(device, early):
    torch.manual_seed(0)
    model = Branches().to(device)
    x, y = torch.randn(6, 4, device=device), torch.arange(6, device=device) % 3
    expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    rows, seen = early(model, F.cross_entropy, x, y)
    assert_same(rows, expected)
    assert seen == [2, 2, 2, 4]  # the gradients of `unused` are zeros


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device, early):
    model, x, y = mlp(device)
    with torch.autocast(device.type, dtype):
        expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
        rows, seen = early(model, F.cross_entropy, x, y)
    assert_same(rows, expected)
    assert len(seen) == 3


def test_registered_formulas_are_not_called_in_the_backward_pass(monkeypatch, early):
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * x

    monkeypatch.setattr("torchium._per_sample.formulas._registered", {})
    torchium.gradients.register_layer(Scale, lambda layer, x, g: {"factor": x * g})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), Scale(), nn.Linear(5, 3))
    _, x, y = mlp()
    expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    rows, seen = early(model, F.cross_entropy, x, y)
    assert_same(rows, expected)
    assert seen == [2, 3]


class Failing:
    """In place of LayerCalls.run: the first calls raise."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error = failures, error
        self.run = implementation.LayerCalls.run

    def __get__(self, calls: Any, owner: type) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.failures -= 1
            if self.failures >= 0:
                raise self.error
            return self.run(calls, *args, **options)

        return run


@pytest.mark.parametrize("error", [LookupError("of the core"), torch.OutOfMemoryError("no memory")])
def test_an_error_of_the_operator_is_raised_as_itself(error, monkeypatch):
    model, x, y = mlp()
    monkeypatch.setattr(implementation, "_has_large_rows", lambda params, call: True)
    monkeypatch.setattr(implementation.LayerCalls, "run", Failing(3, error))
    with pytest.raises(type(error), match=str(error)):
        torchium.per_sample_gradients(model, F.cross_entropy, x, y)


@pytest.mark.parametrize("failures", [1, 2])
def test_rows_without_memory_in_the_backward_pass_are_written_after_it(failures, monkeypatch):
    model, x, y = mlp()
    expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    monkeypatch.setattr(implementation, "_has_large_rows", lambda params, call: True)
    failing = Failing(failures, torch.OutOfMemoryError("no memory"))
    monkeypatch.setattr(implementation.LayerCalls, "run", failing)
    assert_same(torchium.per_sample_gradients(model, F.cross_entropy, x, y), expected)
    assert failing.failures == failures - 3  # two calls in the backward pass and one after it


@pytest.mark.parametrize("make", [lambda: mlp()[0], lambda: nn.Sequential(mlp()[0], Passing())])
def test_a_backward_pass_without_memory_is_run_again_without_early_rows(make, monkeypatch, early):
    model, (_, x, y) = make(), mlp()
    expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    original, passes = torch.autograd.grad, []

    def grad(*args: Any, **options: Any) -> Any:
        passes.append(options)
        gradients = original(*args, **options)
        if len(passes) == 1:
            raise torch.OutOfMemoryError("no memory")
        return gradients

    monkeypatch.setattr(torch.autograd, "grad", grad)
    rows, seen = early(model, F.cross_entropy, x, y)
    assert_same(rows, expected)
    assert seen == [2, 1, 5]
    assert len(passes) == 2


class Passing(nn.Module):
    """A class that is not known to keep samples apart."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("make", [lambda: mlp()[0], lambda: nn.Sequential(mlp()[0], Passing())])
@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_removed_and_the_graph_is_freed(make, fails, monkeypatch, early):
    model, (_, x, y) = make(), mlp()
    hooks: list[Any] = []
    original = implementation._hooks_for_rows

    def hooks_for_rows(*args: Any) -> list[Any]:
        found = original(*args)
        hooks.extend(found)
        if fails:
            monkeypatch.setattr(torch.autograd, "grad", no_gradient)
        return found

    def no_gradient(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(implementation, "_hooks_for_rows", hooks_for_rows)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            early(model, F.cross_entropy, x, y)
            assert hooks
            assert all(hook.hooks_dict_ref() is None for hook in hooks)  # a node owns the dict
    finally:
        gc.enable()


def test_norms_and_products_are_computed_after_the_backward_pass(monkeypatch):
    model, x, y = mlp()
    monkeypatch.setattr(implementation, "_hooks_for_rows", None)
    torchium.gradients.per_sample_norms(model, F.cross_entropy, x, y)
    torchium.gradients.gram(model, F.cross_entropy, x, y)


def test_large_rows_on_a_gpu_are_written_early(device):
    samples = torch.ones(2, device=device)
    call = implementation.RecordedCall(None, {"weight": 0}, samples, 0, None, None, False)
    for elements, is_large in ((2**23, device.type == "cuda"), (2**23 - 1, False)):
        params = [torch.empty(elements, device="meta")]
        assert implementation._has_large_rows(params, call) == is_large
