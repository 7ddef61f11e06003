"""The optimizers of the zoo, each with the settings that its documentation recommends."""

from __future__ import annotations

from typing import Any

import torchium
from task import MakeOptimizer
from torch import nn
from torch.optim import Optimizer


def _of_parameters(cls: type[Optimizer], **options: Any) -> MakeOptimizer:
    return lambda model: cls(model.parameters(), **options)


def _of_model(cls: type[Optimizer], **options: Any) -> MakeOptimizer:
    return lambda model: cls(model, **options)


def _from_adamw(model: nn.Module) -> Optimizer:
    return torchium.Shampoo.from_adamw(model.parameters(), lr=3e-3)


# More damping and fresher inverses than docs/choosing_and_tuning.md has: batches are small here.
_TUNED_KFAC: dict[str, Any] = {"lr": 0.01, "damping": 0.03, "TCov": 5, "TInv": 10}

SETTINGS: dict[str, MakeOptimizer] = {
    "shampoo": _of_parameters(torchium.Shampoo),
    "shampoo_adam": _of_parameters(
        torchium.Shampoo,
        lr=0.003,
        betas=(0.9, 1.0),
        grafting="adam",
        update_freq=20,
        block_size=256,
    ),
    "shampoo_from_adamw": _from_adamw,
    "shampoo_w": _of_model(torchium.ShampooW, lr=3e-3),
    "adagrad": _of_parameters(torchium.Adagrad, lr=0.02),
    "adagrad_full": _of_parameters(torchium.Adagrad, lr=0.05, full_matrix=True),
    "kfac": _of_model(torchium.KFAC),
    "kfac_pi": _of_model(torchium.KFAC, **{**_TUNED_KFAC, "damping": 0.1}),
    "kfac_plain": _of_model(torchium.KFAC, **_TUNED_KFAC, damping_split="plain"),
    "kfac_exact": _of_model(torchium.KFAC, **_TUNED_KFAC, damping_split="exact"),
    "kfac_inverse_free": _of_model(
        torchium.KFAC,
        lr=0.01,
        damping=0.1,
        stat_decay=0.8,
        solver="inverse_free",
        structures=("block_diagonal", "dense"),
    ),
    "natural_gradient": _of_model(torchium.NaturalGradient),
}
REFUSING = ("natural_gradient",)
_FAMILIES = ("shampoo", "adagrad", "kfac", "natural_gradient")


def half_of_the_settings(turn: int) -> list[str]:
    """Every optimizer, with half of its settings; consecutive turns take different ones."""
    chosen = []
    for family in _FAMILIES:
        names = [name for name in SETTINGS if name.startswith(family)]
        chosen += [names[(turn + i) % len(names)] for i in range((len(names) + 1) // 2)]
    return chosen
