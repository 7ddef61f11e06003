"""The C++ and Python K-FAC and natural gradient train one transformer alike.

The forward passes are those of ``torch::nn`` and ``torch.nn``, which round differently.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchium
from curvature_losses import classify
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS, SAMPLES, POSITIONS, WIDTH, HEADS, HIDDEN, CLASSES = 4, 7, 5, 8, 2, 16, 3


class Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


class Translating(nn.Module):
    """Its decoder also attends to other keys, whose projection falls back."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 1, HIDDEN, dropout=0.0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        given = x.transpose(0, 1)
        return self.head(self.transformer(given, given.tanh()).mean(0))


CASES: dict[str, tuple[type[nn.Module], Callable[[nn.Module], Optimizer]]] = {
    "kfac": (Translating, lambda model: torchium.KFAC(model, lr=0.1, TCov=1, TInv=1)),
    "kfac_reduce": (
        Translating,
        lambda model: torchium.KFAC(model, lr=0.1, TCov=1, TInv=1, weight_sharing="reduce"),
    ),
    "kfac_ggn": (
        Translating,
        lambda model: torchium.KFAC(model, lr=0.1, TCov=1, TInv=1, fisher="ggn"),
    ),
    "natural_gradient": (Encoding, lambda model: torchium.NaturalGradient(model, lr=0.1)),
    "natural_gradient_ggn": (
        Encoding,
        lambda model: torchium.NaturalGradient(model, lr=0.1, fisher="ggn"),
    ),
}


def trained(name: str, folder: Path) -> dict[str, Tensor]:
    """The parameters that Python's optimizer reaches from those that it writes for C++."""
    kind, make = CASES[name]
    torch.manual_seed(0)
    model = kind().double()
    inputs = torch.randn(STEPS, SAMPLES, POSITIONS, WIDTH, dtype=torch.float64)
    targets = torch.randint(CLASSES, (STEPS, SAMPLES))
    given = {key: param.detach() for key, param in model.named_parameters()}
    torch.save({**given, "inputs": inputs, "targets": targets}, folder / f"{name}.pt")
    optimizer = make(model)
    for x, y in zip(inputs, targets, strict=True):
        classify(model, optimizer, x, y)
    return {key: param.detach() for key, param in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:KFAC preconditions", "ignore:enable_nested_tensor")
def test_transformers_train_alike(programs: Path, tmp_path: Path) -> None:
    expected = {name: trained(name, tmp_path) for name in CASES}
    run = subprocess.run([programs, "transformers", tmp_path], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for name, params in expected.items():
        found = torch.load(tmp_path / f"{name}_cpp.pt", weights_only=False)  # a typed dict
        torch.testing.assert_close(found, params, rtol=1e-9, atol=1e-9)
