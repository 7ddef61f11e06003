"""Norms, inner products and clipped sums of explicit per-sample gradients, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def jacobian(rows: dict[str, Tensor]) -> Tensor:
    """[batch, all elements of all parameters]."""
    return torch.cat([r.unsqueeze(-1).flatten(1).double() for r in rows.values()], 1)


def norms(rows: dict[str, Tensor]) -> Tensor:
    return jacobian(rows).norm(dim=1)


def gram(rows: dict[str, Tensor]) -> Tensor:
    J = jacobian(rows)
    return J @ J.T


def jvp_dots(rows: dict[str, Tensor], vectors: dict[str, Tensor]) -> Tensor:
    return jacobian(rows) @ torch.cat([vectors[name].flatten().double() for name in rows])


def clipped_sums(rows: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    sums = {name: torch.zeros_like(r[0], dtype=torch.float64) for name, r in rows.items()}
    for i, norm in enumerate(norms(rows)):
        for name, r in rows.items():
            sums[name] += min(1.0, max_norm / float(norm)) * r[i].double() if norm > 0 else 0
    return sums
