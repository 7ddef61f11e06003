"""Clipped sums against opacus' optimizer for differentially private training."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from captured_layers import MODELS, loss_fn, model_and_batch
from torch import Tensor, nn
from torchium import gradients

pytestmark = pytest.mark.xdist_group("opacus")  # one worker imports it, for seconds


@pytest.fixture(scope="module")
def opacus() -> Any:
    return pytest.importorskip("opacus")


def opacus_sums(
    opacus: Any, model: nn.Module, x: Tensor, y: Tensor, max_norm: float
) -> list[Tensor]:
    wrapped = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=max_norm,
        expected_batch_size=len(x),
        loss_reduction="sum",
    )
    loss_fn(wrapped(x), y, reduction="sum").backward()
    optimizer.clip_and_accumulate()
    return [p.summed_grad for p in wrapped.parameters()]


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"sequence", "shared_everywhere"}))
@pytest.mark.parametrize("clipped", [0, 3, 6])
def test_clipped_sums_are_those_of_opacus(name, clipped, opacus):
    """With no, some and all gradients clipped. opacus adds 1e-6 to the norms."""
    model, (x, y) = model_and_batch(name, samples=6)
    if name == "two_tables":
        del model.unused  # opacus wants a gradient for every parameter
    if "embedding" in name:
        model.table.padding_idx = None  # opacus counts the padding row in the norms
    norms = gradients.per_sample_norms(model, loss_fn, x, y).sort().values
    limits = {0: 2 * norms[-1], 3: (norms[2] + norms[3]) / 2, 6: norms[0] / 2}
    max_norm = float(limits[clipped])
    found = gradients.clip_and_accumulate(model, loss_fn, x, y, max_norm)
    assert int((found > max_norm).sum()) == clipped
    expected = opacus_sums(opacus, model, x, y, max_norm)
    for p, total in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, total, rtol=1e-4, atol=1e-5 * max_norm)


def test_grad_samples_are_those_of_opacus(opacus):
    model, (x, y) = model_and_batch("convolutions")
    wrapped = opacus.GradSampleModule(copy.deepcopy(model))
    loss_fn(wrapped(x), y).backward()
    with gradients.per_sample(model):
        loss_fn(model(x), y).backward()
    for p, q in zip(model.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(p.grad_sample, q.grad_sample)


@pytest.fixture(scope="module")
def dp_sgd() -> ModuleType:
    """The example."""
    folder = Path(__file__).resolve().parents[3] / "examples" / "python"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        pytest.importorskip("tqdm")
        spec = importlib.util.spec_from_file_location("dp_sgd", folder / "dp_sgd.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.3])
def test_a_noisy_step_of_the_example_is_that_of_opacus(noise_multiplier, opacus, dp_sgd):
    """The same noise for both. The batch is smaller than expected, as Poisson sampling makes it."""
    model, (x, y) = model_and_batch("convolutions", samples=6)
    max_norm, expected_size, lr = 0.4, 8, 0.3
    wrapped = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    theirs = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=lr, momentum=0.9),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_norm,
        expected_batch_size=expected_size,
        loss_reduction="mean",
        generator=torch.Generator().manual_seed(11),
    )
    loss_fn(wrapped(x), y, reduction="sum").backward()
    theirs.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for part in torch.arange(6).split(4):
        gradients.clip_and_accumulate(model, loss_fn, x[part], y[part], max_norm)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        dp_sgd.add_noise(model, noise_multiplier * max_norm, expected_size)
    optimizer.step()
    torch.testing.assert_close(
        list(model.parameters()), list(wrapped.parameters()), rtol=1e-5, atol=1e-5
    )
