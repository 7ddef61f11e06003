"""What Shampoo takes over from AdamW, and what it adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .options import OptionList

SHAMPOO = OptionList("Shampoo")


def options_beside_adamw() -> dict[str, Any]:
    """Shampoo's own options where the caller says nothing else (``src/optim/core/from_adamw.cpp``)."""
    values = torch.ops.torchium.options_beside_adamw()
    return dict(zip(values[::2], values[1::2], strict=True))


# How PyTorch runs its own step; without a meaning for ours.
_IMPLEMENTATION = ("foreach", "fused")
# What an AdamW instance says itself. Its `capturable` is not taken over: see Shampoo.from_adamw.
_OF_THE_INSTANCE = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "decoupled_weight_decay",
    *_IMPLEMENTATION,
    "amsgrad",
    "maximize",
    "differentiable",
)


def adopt(
    optimizer: Optimizer, hyperparameters: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Parameter groups and defaults, in AdamW's terms, of what takes the place of ``optimizer``."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        raise ValueError(
            "optimizer_or_params must be a torch.optim.AdamW or torch.optim.Adam, or parameters, "
            f"got {type(optimizer).__name__}"
        )
    known = sorted(name for name in hyperparameters if name in _OF_THE_INSTANCE)
    if known:
        raise ValueError(
            f"{known[0]}={hyperparameters[known[0]]!r} cannot be given beside an optimizer, which "
            "has its own; set it in the param_groups of either optimizer, or pass parameters"
        )
    groups = [
        {**group, "capturable": False, **hyperparameters, "params": list(group["params"])}
        for group in optimizer.param_groups
    ]
    return groups, {**optimizer.defaults, "capturable": False, **hyperparameters}


def shampoo_options(adamw: Mapping[str, Any], *, with_eps: bool = True) -> dict[str, Any]:
    """Shampoo's options for those of AdamW; all others are left as they are.

    ``with_eps=False``: ``eps`` is Shampoo's already. Raises ValueError for what Shampoo cannot do.
    """
    options = {key: value for key, value in adamw.items() if key not in _IMPLEMENTATION}
    if options.pop("amsgrad", False):
        raise ValueError("amsgrad=True is not supported by Shampoo; use amsgrad=False")
    if options.pop("differentiable", False):
        raise ValueError(
            "differentiable=True is not supported: no gradient flows through a step of Shampoo"
        )
    if "betas" in options:
        options["betas"] = _plain_numbers(options["betas"])
    if with_eps and "eps" in options:
        eps = SHAMPOO.checked_one("eps", options["eps"])
        # (a + eps^2)^(-1/2) of the diagonal rule is close to Adam's 1 / (sqrt(a) + eps).
        options["eps"] = eps * eps
        options.setdefault("grafting_eps", eps)
    return options


def _plain_numbers(betas: Any) -> Any:
    """Tensors with one element, which torch's own optimizers take too, as numbers."""
    if not isinstance(betas, (tuple, list)):
        return betas
    return tuple(beta.item() if isinstance(beta, Tensor) else beta for beta in betas)
