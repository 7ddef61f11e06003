"""Checks of the arguments of ``update_curvature()`` and ``update_damping()``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The arguments of update_curvature(), in the order of the core.
_TYPES: tuple[tuple[str, Any], ...] = (
    ("outputs", Tensor),
    ("loss", str),
    ("reduction", str),
    ("class_dim", int | None),
    ("mask", Tensor | None),
    ("samples", int),
    ("generator", torch.Generator | None),
)


def check_curvature_arguments(*values: Any) -> None:
    """Raises ValueError for arguments of update_curvature() of the wrong type."""
    for (name, kind), value in zip(_TYPES, values, strict=True):
        if not isinstance(value, kind) or isinstance(value, bool):
            wanted = getattr(kind, "__name__", kind)
            remedy = "; pass its logits" if hasattr(value, "logits") else ""
            raise ValueError(f"{name} must be of type {wanted}, got {type(value).__name__}{remedy}")


def as_number(name: str, loss: float | Tensor) -> float:
    """A loss as Python's number."""
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(loss.shape)}")
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number or a tensor with one, got {loss!r}") from None
