"""The compared optimizers, with their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchium
from torch import Tensor, nn
from torch.optim import Optimizer

from learning.task import Task

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of weights; biases and scales have none
ADAMW_OPTIONS = f"Betas {BETAS[0]:g} and {BETAS[1]:g}, weight decay {WEIGHT_DECAY:g} of weights."

# Without weight decay, which natural gradient does not have.
KFAC_OPTIONS: dict[str, Any] = {
    "damping": 0.01,
    "kl_clip": None,
    # The factors change by orders of magnitude in the first steps.
    "TCov": lambda step: 1 if step <= 20 else 10,
    "TInv": lambda step: 1 if step <= 20 else 20,
}
NATURAL_GRADIENT_OPTIONS: dict[str, Any] = {"fisher": "mc", "update_freq": 4}
CURVATURE_OPTIONS = (
    "None has weight decay; SGD has momentum 0.9. K-FAC: damping 0.01, no KL clip, factors and inverses in "
    "each of the first 20 steps, then every 10 and every 20. Natural gradient: defaults, but "
    'fisher="mc" and a new matrix in every fourth step.'
)

Optimizers = list[Optimizer]  # they share the model's parameters
Make = Callable[[Task, nn.Module, float], Optimizers]


def adamw(model: nn.Module, lr: float, without: Sequence[nn.Parameter] = ()) -> Optimizer:
    """For all parameters except those in `without`."""
    left_out = set(map(id, without))
    params = [p for p in model.parameters() if id(p) not in left_out]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    is_cuda = params[0].is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=is_cuda or None)


class MatrixMuon(torch.optim.Muon):
    """Muon, which supports only matrices, for convolutions too.

    A convolution [outputs, inputs, height, width] is stepped as the matrix [outputs, rest], which shares its
    memory.
    """

    def __init__(self, weights: Sequence[nn.Parameter], **options: Any) -> None:
        matrices = [p if p.dim() == 2 else p.detach().flatten(1) for p in weights]
        pairs = zip(weights, matrices, strict=True)
        self._convolutions = [(p, matrix) for p, matrix in pairs if p is not matrix]
        super().__init__(matrices, **options)

    def step(self, closure: Any = None) -> Any:
        for p, matrix in self._convolutions:
            matrix.grad = None if p.grad is None else p.grad.flatten(1)
        return super().step(closure)


def muon(task: Task, model: nn.Module, lr: float) -> Optimizers:
    """Muon for the hidden weights, scaled to AdamW's root mean square, and AdamW for the rest."""
    hidden = task.hidden(model)
    options = {"weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}
    return [MatrixMuon(hidden, lr=lr, **options), adamw(model, lr, hidden)]


def shampoo(update_freq: int) -> Make:
    def make(task: Task, model: nn.Module, lr: float) -> Optimizers:
        return [torchium.Shampoo.from_adamw(adamw(model, lr), update_freq=update_freq)]

    return make


def against_adamw(*rates: float) -> dict[str, Sequence[float]]:
    """The same learning rates for AdamW and all that replace it."""
    return {name: rates for name in ("AdamW", "Muon", "Shampoo-1", "Shampoo-10", "Shampoo-100")}


def sgd(task: Task, model: nn.Module, lr: float) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)]


def kfac(task: Task, model: nn.Module, lr: float) -> Optimizers:
    return [torchium.KFAC(model, lr=lr, **KFAC_OPTIONS)]


def natural_gradient(task: Task, model: nn.Module, lr: float) -> Optimizers:
    optimizer = torchium.NaturalGradient(model, lr=lr, **NATURAL_GRADIENT_OPTIONS)

    def take_curvature(_: nn.Module, inputs: object, outputs: Tensor) -> None:
        if outputs.requires_grad:  # in a training step
            optimizer.update_curvature(outputs, "cross_entropy")

    model.register_forward_hook(take_curvature)
    return [optimizer]


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda task, model, lr: [adamw(model, lr)],
    "Muon": muon,
    "Shampoo-1": shampoo(1),
    "Shampoo-10": shampoo(10),
    "Shampoo-100": shampoo(100),
    "SGD": sgd,
    "K-FAC": kfac,
    "NaturalGradient": natural_gradient,
}
