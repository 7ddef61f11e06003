"""natural_gradient_factorize and natural_gradient_step_ against dense float64 solves."""

from __future__ import annotations

import pytest
import torch
import torchium  # noqa: F401  registers the operators
from captured_layers import MODELS, Captured, capture, loss_fn, model_and_batch
from reference import ReferenceNaturalGradient
from torch import Tensor

ops = torch.ops.torchium
DAMPINGS = [1e-7, 1e-5, 1e-3, 1e-1, 1.0]


class Step:
    """An optimizer of bare operators: what a face does, without its options and hooks."""

    def __init__(self, params: list[Tensor], **options) -> None:
        self.params = params
        n = len(params)
        self.damping = options.pop("damping", 1e-3)
        self.solver = options.pop("solver", "gram")
        self.update_freq = options.pop("update_freq", 1)
        lr, momentum, maximize = (
            options.pop(key, default)
            for key, default in (("lr", 1.0), ("momentum", 0.0), ("maximize", False))
        )
        spread = lambda x: x if isinstance(x, list) else [x] * n  # noqa: E731
        self.damping = spread(self.damping)
        self.options = {
            "lrs": [torch.tensor(x, dtype=torch.float64) for x in spread(lr)],
            "dampings": self.damping,
            "momentums": spread(momentum),
            "maximize": spread(maximize),
            "eps": 1e-13,
            "max_norm": None,
            "solver": self.solver,
            **options,
        }
        device = params[0].device
        self.steps = [torch.zeros((), device=device) for _ in params]
        dtypes = [torch.float64 if p.dtype == torch.float64 else torch.float32 for p in params]
        self.buffers = [torch.zeros_like(p, dtype=d) for p, d in zip(params, dtypes, strict=True)]
        self.status = torch.tensor([0, 0, -1, 0, -1], device=device)
        self.count = 0

    def __call__(self, captured: Captured, gradients: list[Tensor] | None = None, **more) -> Tensor:
        more = {"scale": float(captured.samples), **more}
        scale = {k: v for k, v in more.items() if k in ("scale", "loss_scale")}
        if refreshed := self.count % self.update_freq == 0:
            self.layers = captured.layers
            self.factorization = ops.natural_gradient_factorize(
                self.params, *self.layers, dampings=self.damping, solver=self.solver, **scale
            )
        self.count += 1
        return ops.natural_gradient_step_(
            self.params,
            captured.gradients if gradients is None else gradients,
            self.steps,
            self.buffers,
            self.status,
            *self.layers,
            self.factorization,
            refreshed=refreshed,
            **self.options,
            **more,
        )


def copies(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def rows_of(captured: Captured) -> list[Tensor]:
    """Tested against single-sample backward passes in test_gradient_ops.py."""
    params = [p.double() for p in captured.params]
    return ops.per_sample_gradients(params, *captured.layers, scale=captured.samples)


def reference_step(reference: ReferenceNaturalGradient, captured: Captured, gradients=None):
    for p, g in zip(reference.params, gradients or captured.gradients, strict=True):
        p.grad = g.double().cpu()
    reference.step([r.cpu() for r in rows_of(captured)])


def assert_updates_close(params, before, expected, tolerance):
    """The change of all parameters together."""
    update, exact = (
        torch.cat([(p - b.to(p)).double().cpu().flatten() for p, b in zip(x, before, strict=True)])
        for x in (params, expected)
    )
    assert (update - exact).norm() <= tolerance * exact.norm()
    assert exact.norm() > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("solver", ["gram", "cg"])
def test_direction_is_the_dense_solve(name, damping, solver, device):
    model, batch = model_and_batch(name, device=device)
    captured = capture(model, loss_fn, [batch])
    params = copies(captured.params)
    expected = [p.clone().cpu() for p in params]
    reference_step(ReferenceNaturalGradient(expected, 1.0, damping), captured)
    Step(params, damping=damping, solver=solver)(captured)
    assert_updates_close(params, captured.params, expected, 1e-6)
