"""AdaGrad (Duchi, Hazan, Singer 2011, JMLR 12), diagonal and block full-matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .blocking import blocks_of
from .roots import damped_power, root_is_due


class ReferenceAdagrad:
    """Changes float64 `params` in place by their `.grad`; options as those of torchium.Adagrad.

    A parameter whose gradient is None is left out of the step, and its step count stays.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.01,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        full_matrix: bool = False,
        block_size: int = 128,
        update_freq: int = 1,
        maximize: bool = False,
    ) -> None:
        self.params = list(params)
        self.lr = lr
        self.lr_decay = lr_decay
        self.weight_decay = weight_decay
        self.initial_accumulator_value = initial_accumulator_value
        self.eps = eps
        self.full_matrix = full_matrix
        self.block_size = block_size
        self.update_freq = update_freq
        self.maximize = maximize
        self.state: list[dict[str, Any]] = [{} for _ in self.params]

    @torch.no_grad()
    def step(self) -> None:
        active = [
            (p, s) for p, s in zip(self.params, self.state, strict=True) if p.grad is not None
        ]
        if all(p.grad.isfinite().all() for p, _ in active):  # else the whole step is skipped
            for p, state in active:
                t = state["step"] = state.get("step", 0) + 1
                g = -p.grad if self.maximize else p.grad
                g = g + self.weight_decay * p
                direction = (
                    self._full_matrix(g, state, t) if self.full_matrix else self._diagonal(g, state)
                )
                p.sub_(self.lr / (1 + (t - 1) * self.lr_decay) * direction)

    def _diagonal(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        initial = torch.full_like(g, self.initial_accumulator_value)
        state["sum"] = state.get("sum", initial) + g**2
        return g / (state["sum"].sqrt() + self.eps)

    def _full_matrix(self, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        """(G + eps I)^(-1/2) g on pieces of `block_size` elements of the flattened parameter."""
        flat = g.reshape(-1)
        direction = torch.empty_like(flat)
        for (block,) in blocks_of(flat.shape, self.block_size):
            x = flat[block]
            initial = self.initial_accumulator_value * torch.eye(len(x), dtype=g.dtype)
            G = state.get(("G", block.start), initial) + torch.outer(x, x)
            state["G", block.start] = G
            if root_is_due(t, self.update_freq):
                state["root", block.start] = damped_power(G, -1 / 2, self.eps)
            direction[block] = state["root", block.start] @ x
        return direction.reshape(g.shape)
