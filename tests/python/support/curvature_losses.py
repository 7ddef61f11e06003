"""The losses of update_curvature()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

FISHERS = ["ggn", "mc"]


def binary(f: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(f, y.expand_as(f).double(), **options)


# name -> torch's function, a target for outputs of this shape
LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "cross_entropy": (
        F.cross_entropy,
        lambda f: torch.arange(len(f), device=f.device) % f.shape[1],
    ),
    "mse": (F.mse_loss, lambda f: torch.ones_like(f)),
    "bce": (binary, lambda f: torch.ones_like(f)),
}
losses = pytest.mark.parametrize("loss", LOSSES)


def classify(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """One step on the cross-entropy of a batch, with its curvature where the Fisher matrix needs it."""
    optimizer.zero_grad()
    outputs = model(x)
    if optimizer.param_groups[0]["fisher"] == "ggn":
        optimizer.update_curvature(outputs, "cross_entropy")
    F.cross_entropy(outputs, y).backward()
    optimizer.step()
