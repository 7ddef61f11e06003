"""The optimizers of both languages with one interface."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torchium
from torch import Tensor


def make(language: str, name: str, params: Any, **options: Any) -> Any:
    if language == "python":
        return getattr(torchium, name)(params, **options)
    return getattr(importlib.import_module("torchium_cpp._C").optim, name)(params, **options)


def state_of(optimizer: Any, param: Tensor) -> dict[str, Tensor]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return dict(optimizer.state[param])
    return optimizer.state(param)


def set_lr(optimizer: Any, lr: float) -> None:
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["lr"] = lr
    else:
        optimizer.set_lr(lr)


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
