"""Options of Shampoo as a replacement for AdamW."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..._callers import users_stacklevel
from .._core.keywords import unexpected_keyword
from .._core.options import OptionList
from .._core.parameters import with_own_tensors
from .sharing import SHARING_ARGUMENTS

SHAMPOO = OptionList("Shampoo")


def options_beside_adamw() -> dict[str, Any]:
    """Defaults of the options that AdamW does not have (``src/optim/shampoo/from_adamw.cpp``)."""
    values = torch.ops.torchium.options_beside_adamw()
    return dict(zip(values[::2], values[1::2], strict=True))


# How PyTorch runs its own step; ignored.
_IMPLEMENTATION = ("foreach", "fused")
# Options that an AdamW instance has itself. Its `capturable` is ignored: see Shampoo.from_adamw.
ADAMW_OPTIONS = (
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


def check_keywords(caller: str, keywords: Iterable[str]) -> None:
    """Raises TypeError for a keyword that :class:`ShampooW` does not have."""
    known = (*ADAMW_OPTIONS, *SHAMPOO.names, *SHARING_ARGUMENTS)
    for name in keywords:
        if name not in known:
            raise unexpected_keyword(caller, name, known)


def adopt(
    optimizer: Optimizer, hyperparameters: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Parameter groups and defaults, with AdamW's options, of the replacement for ``optimizer``."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        raise ValueError(
            "optimizer_or_params must be a torch.optim.AdamW or torch.optim.Adam, or parameters, "
            f"got {type(optimizer).__name__}"
        )
    known = sorted(name for name in hyperparameters if name in ADAMW_OPTIONS)
    if known:
        raise ValueError(
            f"{known[0]}={hyperparameters[known[0]]!r} cannot be given beside an optimizer, which "
            "has its own; set it in the param_groups of either optimizer, or pass parameters"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        warnings.warn(
            "a scheduler was made for this optimizer, which does not change the learning rates of the "
            "new one; make it again, for the new optimizer",
            stacklevel=users_stacklevel(),
        )
    # Schedulers of the other optimizer write into learning rates that are tensors.
    groups = [
        {
            **with_own_tensors(group),
            "capturable": False,
            **hyperparameters,
            "params": list(group["params"]),
        }
        for group in optimizer.param_groups
    ]
    return groups, {**with_own_tensors(optimizer.defaults), "capturable": False, **hyperparameters}


def shampoo_options(adamw: Mapping[str, Any], *, with_eps: bool = True) -> dict[str, Any]:
    """Converts AdamW's options to Shampoo's; all others are left unchanged.

    ``with_eps=False``: ``eps`` is already Shampoo's. Raises ValueError for unsupported options.
    """
    options = {key: value for key, value in adamw.items() if key not in _IMPLEMENTATION}
    amsgrad = bool(options.pop("amsgrad", False))
    if options.pop("differentiable", False):
        raise ValueError(
            "differentiable=True is not supported: no gradient flows through a step of Shampoo"
        )
    if "betas" in options:
        options["betas"] = _plain_numbers(options["betas"])
    eps = SHAMPOO.checked_one("eps", options.get("eps", 0.0))
    own_eps, grafting_eps = torch.ops.torchium.options_of_adamw(eps, amsgrad)
    if with_eps and "eps" in options:
        options["eps"] = own_eps
        options.setdefault("grafting_eps", grafting_eps)
    return options


def _plain_numbers(betas: Any) -> Any:
    """Converts tensors with one element, which torch's optimizers accept too, to numbers."""
    if not isinstance(betas, (tuple, list)):
        return betas
    return tuple(beta.item() if isinstance(beta, Tensor) else beta for beta in betas)
