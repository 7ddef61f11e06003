"""K-FAC layer by layer in PyTorch operators, as it is usually written: what torchium.KFAC is compared with.

The algorithm of torchium.KFAC with damping_split="plain", without KL clip: hooks keep inputs and output
gradients, and each layer updates its factors, inverts them by Cholesky and multiplies on its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class KFACLoop(torch.optim.SGD):
    """Preconditions nn.Linear and nn.Conv2d; other parameters take steps of SGD with momentum."""

    def __init__(
        self, model: nn.Module, lr: float, TCov: int, TInv: int, damping: float = 0.01
    ) -> None:
        super().__init__(model.parameters(), lr=lr, momentum=0.9)
        self.TCov, self.TInv, self.damping = TCov, TInv, damping
        self.steps = 0
        self.layers: list[Any] = [
            m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)
        ]
        self.kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.factors: dict[nn.Module, list[Tensor]] = {}
        self.inverses: dict[nn.Module, list[Tensor]] = {}
        for layer in self.layers:
            layer.register_forward_hook(self.forward_hook)

    def forward_hook(self, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if self.steps % self.TCov == 0:
            output.register_hook(partial(self.backward_hook, layer, args[0].detach()))

    def backward_hook(self, layer: nn.Module, input: Tensor, gradient: Tensor) -> None:
        self.kept[layer] = input, gradient.detach()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for layer in self.layers:
            if layer in self.kept:
                self.update_factors(layer, *self.kept.pop(layer))
            if self.steps % self.TInv == 0:
                self.inverses[layer] = [
                    torch.cholesky_inverse(torch.linalg.cholesky_ex(damped).L)
                    for damped in (
                        factor + self.damping**0.5 * torch.eye(len(factor), device=factor.device)
                        for factor in self.factors[layer]
                    )
                ]
            self.precondition(layer)
        self.steps += 1
        super().step()

    def update_factors(self, layer: Any, input: Tensor, gradient: Tensor) -> None:
        samples = len(input)
        if isinstance(layer, nn.Conv2d):
            input = nn.functional.unfold(
                input, layer.kernel_size, layer.dilation, layer.padding, layer.stride
            ).mT
            gradient = gradient.flatten(2).mT
        a, g = input.flatten(0, -2).to(gradient.dtype), gradient.flatten(0, -2)
        if layer.bias is not None:
            a = torch.cat([a, a.new_ones(len(a), 1)], 1)
        new = [(a.mT @ a).float() / len(a), (g.mT @ g).float() * samples]
        weight = max(0.05, 1 / (self.steps // self.TCov + 1))
        for factor, value in zip(self.factors.setdefault(layer, new), new, strict=True):
            factor.lerp_(value, weight)

    def precondition(self, layer: Any) -> None:
        A, G = self.inverses[layer]
        V = layer.weight.grad.flatten(1)
        if layer.bias is not None:
            V = torch.cat([V, layer.bias.grad.unsqueeze(1)], 1)
        D = G @ V @ A
        if layer.bias is not None:
            layer.bias.grad.copy_(D[:, -1])
            D = D[:, :-1]
        layer.weight.grad.copy_(D.view_as(layer.weight))
