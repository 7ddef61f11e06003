"""Dense Fisher matrices in float64, from the Jacobians of single samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def _jacobian(model: nn.Module, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Of ``function`` of the output, ``[entries, P]``; the rows are separate backward passes."""
    params = list(model.parameters())
    values = function(model).flatten()
    return torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(v, params, retain_graph=True)])
            for v in values
        ]
    )


def empirical_fisher(model: nn.Module, losses: Callable[[nn.Module], Tensor]) -> Tensor:
    """``(1/N) sum_n g_n g_n^T``."""
    gradients = _jacobian(model, losses)
    return gradients.mT @ gradients / len(gradients)


def fisher_of_classes(model: nn.Module, x: Tensor) -> Tensor:
    """``(1/N) sum_n sum_c p_nc g_nc g_nc^T`` with ``g_nc`` the gradient of ``-log p_nc``."""
    p = model(x).softmax(-1).detach()
    gradients = _jacobian(model, lambda model: -model(x).log_softmax(-1))
    return (gradients.mT * p.flatten()) @ gradients / len(x)


def gauss_newton_of_squares(model: nn.Module, x: Tensor) -> Tensor:
    """``(1/N) sum_n J_n^T J_n`` for the losses ``|z_n - y_n|^2 / 2``."""
    jacobian = _jacobian(model, lambda model: model(x))
    return jacobian.mT @ jacobian / len(x)
