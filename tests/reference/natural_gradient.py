"""Natural gradient descent with a damped matrix, formed and solved as it is.

Momentum as in SPRING (Goldshlager, Abrahamsen, Lin 2024, arXiv 2401.10190, eq. 24).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def fisher(rows: Tensor) -> Tensor:
    """F = J^T J / n for J [n, P], the per-sample gradients."""
    return rows.mT @ rows / len(rows)


def gauss_newton(J: Tensor, H: Tensor) -> Tensor:
    """The generalized Gauss-Newton matrix, the mean of J_i^T H_i J_i over the samples (Schraudolph
    2002): J [n, C, P] is the Jacobian of the outputs, H [n, C, C] the Hessian of the loss with respect to
    them.
    """
    return sum(j.mT @ h @ j for j, h in zip(J, H, strict=True)) / len(J)


def natural_gradient(F: Tensor, v: Tensor, damping: Tensor, previous: Tensor) -> Tensor:
    """The direction d that fits F d = v best and stays close to `previous`:

    previous + (F + diag(damping))^-1 (v - F previous).
    """
    return previous + torch.linalg.solve(F + torch.diag(damping), v - F @ previous)


class ReferenceNaturalGradient:
    """Changes float64 `params` in place by their `.grad` and a matrix F of the batch.

    Options as those of torchium.NaturalGradient; `lr`, `damping`, `momentum` and `maximize` are
    numbers, or sequences with one entry per parameter.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float | Sequence[float] = 0.1,
        damping: float | Sequence[float] = 1.0,
        update_freq: int = 1,
        *,
        momentum: float | Sequence[float] = 0.9,
        max_norm: float | None = None,
        maximize: bool | Sequence[bool] = False,
    ) -> None:
        self.params = list(params)
        self.lr = self._of_elements(lr)
        self.damping = self._of_elements(damping)
        self.momentum = self._of_elements(momentum)
        self.sign = 1 - 2 * self._of_elements(maximize)
        self.update_freq = update_freq
        self.max_norm = max_norm
        self.steps = 0
        self.F = torch.empty(0, 0)
        self.direction = torch.zeros_like(self.lr)

    def _of_elements(self, option: float | Sequence[float]) -> Tensor:
        """The option of every element of every parameter, flattened."""
        values = option if isinstance(option, Sequence) else [option] * len(self.params)
        return torch.cat(
            [
                torch.full((p.numel(),), float(x), dtype=torch.float64)
                for p, x in zip(self.params, values, strict=True)
            ]
        )

    def step(self, rows: Sequence[Tensor]) -> None:
        """`rows`: the per-sample gradients, one [n, *shape] per parameter."""
        self.step_with(fisher(torch.cat([r.flatten(1) for r in rows], 1)))

    @torch.no_grad()
    def step_with(self, F: Tensor) -> None:
        """`F` [P, P]: read when a refresh is due."""
        if self.steps % self.update_freq == 0:
            self.F = F
        self.steps += 1
        v = torch.cat([p.grad.flatten() for p in self.params])
        previous = self.momentum * self.direction
        self.direction = natural_gradient(self.F, v, self.damping, previous)
        factor = 1.0
        if self.max_norm is not None:
            factor = min(1.0, self.max_norm / self.direction.norm().item())
        update = self.sign * self.lr * factor * self.direction
        for p, u in zip(self.params, update.split([p.numel() for p in self.params]), strict=True):
            p.sub_(u.view_as(p))
