"""A network and its training, for tests of the capture by optimizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchium
from optimizer_cases import values
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

OPTIMIZERS = {
    "kfac": lambda params: torchium.KFAC(params, lr=0.1, TCov=2, TInv=2, kl_clip=None),
    "natural_gradient": lambda params: torchium.NaturalGradient(params, lr=0.1, damping=0.1),
}
both = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())

Forward = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """A convolution, a norm, and linear layers, one of them called twice."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular")
        self.norm = nn.LayerNorm(36)
        self.twice = nn.Linear(36, 36)
        self.last = nn.Linear(36, 3)
        self.activation = nn.ReLU(inplace=inplace)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.conv(x)).flatten(1))

    def head(self, x: Tensor) -> Tensor:
        x = self.activation(self.twice(x))
        return self.last(self.activation(self.twice(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def net(device: torch.device | str = "cpu", **options: bool) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(**options).to(device)


def batch(step: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 2, 3, 3, generator=generator)
    return x.to(device), torch.randint(3, (8,), generator=generator).to(device)


def backward(model: nn.Module, step: int, forward: Forward | None = None) -> None:
    x, y = batch(step, next(model.parameters()).device)
    F.cross_entropy(model(x) if forward is None else forward(model, x), y).backward()


def train(model, optimizer, forward=None, before=None, steps=4) -> list[Tensor]:
    """Parameters after some steps; `before` is called before each backward pass."""
    for step in range(steps):
        optimizer.zero_grad()
        if before is not None:
            before(model, step)
        backward(model, step, forward)
        optimizer.step()
    return values(model)


def expected(make) -> list[Tensor]:
    """The result of plain training."""
    model = net()
    return train(model, make(model))


def checkpointed(**options) -> Forward:
    def forward(model, x):
        x = checkpoint(model.features, x.requires_grad_(), **options)
        return checkpoint(model.head, x, **options)

    return forward
