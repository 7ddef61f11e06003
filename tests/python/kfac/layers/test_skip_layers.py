"""KFAC(skip_layers=...): layers that are left to SGD, or to the optimizer behind."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
import torchium
from optimizer_cases import ignore_fallback
from torch import Tensor, nn

WHY = ("fallback", "in skip_layers")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten())
        self.head = nn.Linear(9, 3)
        self.head_norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head_norm(self.head(self.encoder(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def backward(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(5, 2, 4, generator=generator)).sin().mean().backward()


CASES = {
    "a name": (["head"], {"head", "head_norm"}),
    "a whole name": (["^head$"], {"head"}),
    "a parent": (["encoder"], {"encoder.0"}),
    "a class by name": (["Conv"], {"encoder.0"}),
    "a class": ([nn.Linear], {"head"}),
    "a base class": ([nn.modules.conv._ConvNd, nn.LayerNorm], {"encoder.0", "head_norm"}),
    "none": ([], set()),
}


@ignore_fallback
@pytest.mark.parametrize("form", ["model", "parameters"])
@pytest.mark.parametrize("case", CASES)
def test_skipped_layers_take_sgd_steps(case, form):
    skip_layers, skipped = CASES[case]
    model = net()
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "kl_clip": None}
    params = model if form == "model" else model.parameters()
    optimizer = torchium.KFAC(params, skip_layers=skip_layers, **options)
    twins = {n: p.detach().clone() for n, p in model.named_parameters()}
    sgd = torch.optim.SGD(twins.values(), lr=0.1, momentum=0.5)
    backward(model)
    for name, p in model.named_parameters():
        twins[name].grad = p.grad.clone()
    optimizer.step()
    sgd.step()
    treatments = list(optimizer.report()["parameters"].values())
    for (name, p), treatment in zip(model.named_parameters(), treatments, strict=True):
        is_skipped = name.rpartition(".")[0] in skipped
        assert (treatment == WHY) == is_skipped, name
        assert torch.allclose(p, twins[name], rtol=1e-6) == is_skipped, name


@ignore_fallback
def test_the_preconditioner_leaves_their_gradients():
    model = net()
    preconditioner = torchium.KFACPreconditioner(model, skip_layers=["Linear"])
    backward(model)
    kept = {n: p.grad.clone() for n, p in model.named_parameters()}
    preconditioner.step()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, kept[name]) == name.startswith("head."), name


@ignore_fallback
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_skip_the_same(copied):
    model = net()
    model, optimizer = copied((model, torchium.KFAC(model, skip_layers=["encoder"])))
    backward(model)
    optimizer.step()
    assert optimizer.report()["parameters"]["encoder.0.weight"] == WHY


@pytest.mark.parametrize("form", ["model", "parameters"])
@pytest.mark.parametrize("make", [torchium.KFAC, torchium.KFACPreconditioner])
def test_entries_that_match_no_layer_are_named_once(make, form):
    model = net()
    optimizer = make(
        model if form == "model" else model.parameters(),
        skip_layers=["^haed$", nn.Conv2d, nn.LayerNorm],
    )
    text = (
        f"{make.__name__} skips no layer for '^haed$', Conv2d of skip_layers, which no name and no class "
        f"of a layer matches; the layers are 'encoder.0' (Conv1d), 'head' (Linear), 'head_norm' (LayerNorm)"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            backward(model)
            optimizer.step()
    texts = [str(each.message) for each in caught]
    assert [each for each in texts if "skips no layer" in each] == [text]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("head", "skip_layers must be a list, got 'head'"),
        (nn.Linear, "skip_layers must be a list"),
        (10**30, "skip_layers must be a list"),
        (["("], "skip_layers has '(', which is neither a regular expression nor a class"),
        ([3], "skip_layers has 3, which is neither"),
        ([int], "skip_layers has <class 'int'>, which is neither"),
        ([b"head"], "skip_layers has b'head', which is neither"),
    ],
)
def test_wrong_values(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        torchium.KFAC(net(), skip_layers=wrong)
