"""K-FAC layer by layer in PyTorch operators, in the style of kfac-pytorch: what torchium.KFAC is compared with.

The algorithm of torchium.KFAC with damping_split="plain". Hooks keep inputs and output gradients, and each
layer does on its own what it does in kfac-pytorch with compute_method="inverse": it makes its new factors
symmetric, inverts by LU decomposition, and waits for its share of the KL clip once per parameter.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def second_moment(x: Tensor) -> Tensor:
    C = x.mT @ (x / len(x))
    return ((C + C.mT) / 2).float()


class KFACLoop(torch.optim.SGD):
    """Preconditions nn.Linear and nn.Conv2d; other parameters take steps of SGD with momentum."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        TCov: int,
        TInv: int,
        damping: float = 0.01,
        kl_clip: float = 0.001,
    ) -> None:
        super().__init__(model.parameters(), lr=lr, momentum=0.9)
        self.lr, self.TCov, self.TInv = lr, TCov, TInv
        self.damping, self.kl_clip = damping, kl_clip
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
                    torch.linalg.inv(
                        factor + self.damping**0.5 * torch.eye(len(factor), device=factor.device)
                    )
                    for factor in self.factors[layer]
                ]
        directions = {layer: self.directions(layer) for layer in self.layers}
        # KL clip, nu = min(1, sqrt(kl_clip / (lr^2 sum <D, V>))) (Osawa et al. 2019)
        change = sum(
            (p.grad * D * self.lr**2).sum().item()
            for pairs in directions.values()
            for p, D in pairs
        )
        nu = min(1.0, math.sqrt(self.kl_clip / abs(change))) if change else 1.0
        for pairs in directions.values():
            for p, D in pairs:
                p.grad = D.contiguous().mul_(nu)
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
        new = [second_moment(a), second_moment(g) * (samples * len(g))]
        weight = max(0.05, 1 / (self.steps // self.TCov + 1))
        for factor, value in zip(self.factors.setdefault(layer, new), new, strict=True):
            factor.lerp_(value, weight)

    def directions(self, layer: Any) -> list[tuple[Any, Tensor]]:
        """The parameters of the layer, with their preconditioned gradients."""
        A, G = self.inverses[layer]
        V = layer.weight.grad.flatten(1)
        if layer.bias is None:
            return [(layer.weight, (G @ V @ A).view_as(layer.weight))]
        D = G @ torch.cat([V, layer.bias.grad.unsqueeze(1)], 1) @ A
        return [(layer.weight, D[:, :-1].view_as(layer.weight)), (layer.bias, D[:, -1])]
