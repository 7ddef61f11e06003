"""A bias that is frozen in mid-run no longer takes part in the Fisher matrix of its weight."""

from __future__ import annotations

import copy

import pytest
import torch
import torchium
from torch import Tensor, nn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), (8, 3)),
    "convolution": (lambda: nn.Conv2d(2, 3, 2), (6, 2, 4, 4)),
    "groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), (6, 4, 4, 4)),
    "norm": (lambda: nn.LayerNorm(3), (8, 3)),
}
SETTINGS = {
    "pi": {},
    "plain": {"damping_split": "plain"},
    "exact": {"damping_split": "exact"},
    "ekfac": {"damping_split": "exact", "ekfac": True},
    "eigh": {"solver": "eigh"},
    "cholesky": {"solver": "cholesky"},
    "newton": {"solver": "newton"},
}


def optimizer_of(layer: nn.Module, setting: str) -> torchium.KFAC:
    return torchium.KFAC(
        layer,
        lr=1.0,
        momentum=0.0,
        kl_clip=None,
        damping=1e-2,
        TCov=1,
        TInv=1,
        stat_decay=0.0,  # no average of the steps before is left
        **SETTINGS[setting],
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_bias_can_be_frozen_and_thawed(device, name, setting):
    make, shape = LAYERS[name]
    dtype = torch.float64 if device == "cpu" else torch.float32
    tolerance = 1e-9 if device == "cpu" else 1e-3
    torch.manual_seed(0)
    start = make().to(device, dtype)
    x = torch.randn(shape, dtype=dtype, device=device) + 1
    y = torch.randn_like(start(x))

    def step(layer: nn.Module, optimizer: torchium.KFAC) -> tuple[Tensor, Tensor]:
        """Weight and bias one step after the start, in the second of two: the first makes the basis of EKFAC."""
        for _ in range(2):
            layer.load_state_dict(start.state_dict())
            optimizer.zero_grad()
            (layer(x) - y).square().flatten(1).sum(1).mean().backward()
            optimizer.step()
        return layer.weight.detach().clone(), layer.bias.detach().clone()

    def fresh(trains_bias: bool) -> tuple[Tensor, Tensor]:
        layer = copy.deepcopy(start)
        layer.bias.requires_grad_(trains_bias)
        return step(layer, optimizer_of(layer, setting))

    layer = copy.deepcopy(start)
    optimizer = optimizer_of(layer, setting)
    for trains_bias in (True, False, True):
        layer.bias.requires_grad_(trains_bias)
        found = step(layer, optimizer)
        torch.testing.assert_close(found, fresh(trains_bias), rtol=tolerance, atol=tolerance)
