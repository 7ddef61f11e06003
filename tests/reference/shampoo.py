"""Shampoo (Gupta, Koren, Singer 2018, arXiv 1802.09568), with blocks and grafting (Anil et al.
2020, arXiv 2002.09018; Shi et al. 2023, arXiv 2309.06497).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .blocking import blocks_of, preconditioned_shape
from .roots import damped_power, root_is_due


class ReferenceShampoo:
    """Changes float64 `params` in place by their `.grad`; options as those of torchium.Shampoo.

    A parameter whose gradient is None is left out of the step, and its step count stays.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.03,
        eps: float = 1e-4,
        update_freq: int = 100,
        weight_decay: float = 0.0,
        *,
        betas: tuple[float, float] = (0.0, 1.0),
        momentum: float = 0.0,
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        relative_eps: float = 0.0,
        block_size: int = 1024,
        merge_dims: bool = True,
        target_order: int | None = None,
        exponent: float | None = None,
        exponent_warmup: int = 0,
        preconditioner_1d: str = "diagonal",
        preconditioned: bool = True,
        max_preconditioned_dim: int | None = 16384,
        grafting: str | None = None,
        grafting_eps: float = 1e-8,
        grafting_beta2: float | None = None,
        start_preconditioning_step: int = 1,
        maximize: bool = False,
    ) -> None:
        self.params = list(params)
        self.lr = lr
        self.eps = eps
        self.update_freq = update_freq
        self.weight_decay = weight_decay
        self.beta1, self.beta2 = betas
        self.momentum = momentum
        self.nesterov = nesterov
        self.decoupled_weight_decay = decoupled_weight_decay
        self.relative_eps = relative_eps
        self.block_size = block_size
        self.merge_dims = merge_dims
        self.target_order = target_order
        self.exponent = exponent
        self.exponent_warmup = exponent_warmup
        self.preconditioner_1d = preconditioner_1d
        self.preconditioned = preconditioned
        self.max_preconditioned_dim = max_preconditioned_dim
        self.grafting = grafting
        self.grafting_eps = grafting_eps
        if grafting_beta2 is None:
            grafting_beta2 = self.beta2 if self.beta2 < 1 else 0.999
        self.grafting_beta2 = grafting_beta2
        self.start = start_preconditioning_step
        self.maximize = maximize
        self.state: list[dict[str, Any]] = [{} for _ in self.params]

    @torch.no_grad()
    def step(self) -> None:
        active = [
            (p, s) for p, s in zip(self.params, self.state, strict=True) if p.grad is not None
        ]
        if all(p.grad.isfinite().all() for p, _ in active):  # else the whole step is skipped
            for p, state in active:
                self._step_of(p, p.grad, state)

    def _step_of(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        t = state["step"] = state.get("step", 0) + 1
        g = -g if self.maximize else g
        if self.decoupled_weight_decay:
            p.mul_(1 - self.lr * self.weight_decay)
        else:
            g = g + self.weight_decay * p

        m = self._first_moment(g, state, t)
        graft = self._grafted_direction(g, m, state, t)
        d = self._preconditioned(g, m, graft, state, t)
        if t < self.start:
            d = m if graft is None else graft

        if self.momentum > 0:
            buffer = self.momentum * state.get("momentum_buffer", torch.zeros_like(d)) + d
            state["momentum_buffer"] = buffer
            d = d + self.momentum * buffer if self.nesterov else buffer
        p.sub_(self.lr * d)

    def _first_moment(self, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        if self.beta1 == 0:
            return g
        previous = state.get("exp_avg", torch.zeros_like(g))
        state["exp_avg"] = self.beta1 * previous + (1 - self.beta1) * g
        return state["exp_avg"] / (1 - self.beta1**t)

    def _grafted_direction(
        self, g: Tensor, m: Tensor, state: dict[str, Any], t: int
    ) -> Tensor | None:
        """The direction of the grafted method on the whole parameter; None without grafting."""
        if self.grafting is None or self.grafting == "sgd":
            return m if self.grafting == "sgd" else None
        v = state.get("grafting_second_moment", torch.zeros_like(g))
        b2 = self.grafting_beta2
        v = v + g**2 if self.grafting == "adagrad" else b2 * v + (1 - b2) * g**2
        state["grafting_second_moment"] = v
        if self.grafting == "adam":
            v = v / (1 - b2**t)
        return m / (v.sqrt() + self.grafting_eps)

    def _preconditioned(
        self, g: Tensor, m: Tensor, graft: Tensor | None, state: dict[str, Any], t: int
    ) -> Tensor:
        """m preconditioned block by block, each block scaled to the norm of its grafted one."""
        shape = preconditioned_shape(g.shape, self.block_size, self.merge_dims, self.target_order)
        excluded = not self._is_preconditioned(shape)
        if excluded and self.grafting in ("adagrad", "rmsprop", "adam"):
            assert graft is not None
            return graft
        diagonal = excluded or (len(shape) <= 1 and self.preconditioner_1d == "diagonal")
        if excluded:
            shape = [g.numel()]
        elif self.target_order != 0:
            shape = shape or [1]
        direction = torch.empty(shape, dtype=g.dtype)
        for block in blocks_of(shape, self.block_size):
            key = tuple((piece.start, piece.stop) for piece in block)
            block_state = state.setdefault("blocks", {}).setdefault(key, {})
            g_block, m_block = g.reshape(shape)[block], m.reshape(shape)[block]
            if diagonal:
                d = self._diagonal_rule(g_block, m_block, block_state, t)
            else:
                d = self._kronecker_rule(g_block, m_block, block_state, t)
            if graft is not None:
                norm = d.norm()
                d = d * (graft.reshape(shape)[block].norm() / norm if norm > 0 else 0.0)
            direction[block] = d
        return direction.reshape(g.shape)

    def _is_preconditioned(self, shape: list[int]) -> bool:
        limit = self.max_preconditioned_dim
        return self.preconditioned and (limit is None or max(shape, default=1) <= limit)

    def _diagonal_rule(self, g: Tensor, m: Tensor, state: dict[str, Any], t: int) -> Tensor:
        state["diagonal"] = self._accumulate(state.get("diagonal", torch.zeros_like(g)), g**2)
        return m * (state["diagonal"] / self._bias_correction(t) + self.eps) ** (-1 / 2)

    def _kronecker_rule(self, g: Tensor, m: Tensor, state: dict[str, Any], t: int) -> Tensor:
        k = g.dim()
        for i in range(k):
            G = mode_matrix(g, i)
            L = state.get(f"L{i}", torch.zeros(len(G), len(G), dtype=g.dtype))
            state[f"L{i}"] = self._accumulate(L, G @ G.T)
            if root_is_due(t, self.update_freq, self.start):
                exponent = self._exponent(k, t)
                state[f"R{i}"] = damped_power(
                    state[f"L{i}"] / self._bias_correction(t), exponent, self.eps, self.relative_eps
                )
        if t < self.start:
            return m
        for i in range(k):
            m = multiply_mode(state[f"R{i}"], m, i)
        return m

    def _exponent(self, k: int, t: int) -> float:
        if t >= self.exponent_warmup:
            return -1 / (2 * k) if self.exponent is None else self.exponent
        first = 2 * k
        last = first if self.exponent is None else -1 / self.exponent
        return -1 / (first + math.trunc((last - first) * (t / self.exponent_warmup)))

    def _accumulate(self, previous: Tensor, new: Tensor) -> Tensor:
        if self.beta2 == 1:
            return previous + new
        return self.beta2 * previous + (1 - self.beta2) * new

    def _bias_correction(self, t: int) -> float:
        return 1.0 if self.beta2 == 1 else 1 - self.beta2**t


def mode_matrix(g: Tensor, mode: int) -> Tensor:
    """mat_i(g): [n_i, product of the other dimensions]."""
    return g.movedim(mode, 0).reshape(g.shape[mode], -1)


def multiply_mode(R: Tensor, x: Tensor, mode: int) -> Tensor:
    """x with its dimension `mode` multiplied by the matrix R."""
    return torch.tensordot(R, x, dims=([1], [mode])).movedim(0, mode)
