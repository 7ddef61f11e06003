"""AdaHessian (Yao et al. 2021, arXiv 2006.00719), with the random signs given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class ReferenceAdaHessian:
    """Changes float64 `params` in place; options as those of torchium.AdaHessian.

    `step` takes the loss as a function of nothing, and for each sample one tensor of signs per parameter.
    The Hessian is formed as a matrix.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float = 0.15,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        hessian_power: float = 1.0,
        update_each: int = 1,
    ) -> None:
        self.params = list(params)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.weight_decay, self.hessian_power = weight_decay, hessian_power
        self.update_each = update_each
        self.state: list[dict[str, Any]] = [{} for _ in self.params]
        self.steps = 0

    def hessian(self, loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """The gradient [P] and the Hessian [P, P]."""
        gradients = torch.autograd.grad(loss(), self.params, create_graph=True)
        gradient = torch.cat([g.reshape(-1) for g in gradients])
        blocks = torch.autograd.grad(
            gradient, self.params, torch.eye(len(gradient)).to(gradient), is_grads_batched=True
        )
        return gradient.detach(), torch.cat([block.flatten(1) for block in blocks], 1)

    def step(self, loss: Callable[[], Tensor], signs: Sequence[Sequence[Tensor]]) -> None:
        gradient, H = self.hessian(loss)
        estimates = []
        for sample in signs:
            z = torch.cat([part.reshape(-1) for part in sample])
            estimates.append(z * (H @ z))
        D = torch.stack(estimates).mean(0).abs() if signs else torch.zeros_like(gradient)
        sizes = [p.numel() for p in self.params]
        b1, b2 = self.betas
        t = self.steps = self.steps + 1
        with torch.no_grad():
            for p, state, g, d in zip(
                self.params, self.state, gradient.split(sizes), D.split(sizes), strict=True
            ):
                if (t - 1) % self.update_each == 0:
                    state["D"] = self.averaged(d.reshape(p.shape))
                m = b1 * state.get("m", 0.0) + (1 - b1) * g.reshape(p.shape)
                v = b2 * state.get("v", 0.0) + (1 - b2) * state["D"] ** 2
                state["m"], state["v"] = m, v
                denominator = (v / (1 - b2**t)) ** (self.hessian_power / 2) + self.eps
                p.mul_(1 - self.lr * self.weight_decay)
                p.sub_(self.lr * m / (1 - b1**t) / denominator)

    @staticmethod
    def averaged(diagonal: Tensor) -> Tensor:
        """The mean over the kernel of a convolution."""
        kernel = tuple(range(2, diagonal.dim()))
        return diagonal.mean(kernel, keepdim=True).expand_as(diagonal) if kernel else diagonal
