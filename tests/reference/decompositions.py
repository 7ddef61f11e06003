"""Polar factors in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Polar(NamedTuple):
    U: Tensor
    H: Tensor


def polar(A: Tensor) -> Polar:
    """``A = U H`` with ``U = W V^T`` and ``H = V S V^T``, for ``A = W S V^T``."""
    W, S, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    return Polar(W @ Vh, (Vh.mT * S.unsqueeze(-2)) @ Vh)
