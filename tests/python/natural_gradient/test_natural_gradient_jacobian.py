"""NaturalGradient.update_jacobian(): residuals and their Jacobian from the caller."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchium
from cuda_waits import no_waits
from reference import ReferenceNaturalGradient, fisher
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F

SOLVERS = ["gram", "explicit", "cg"]


def network(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64
) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    return model.to(device, dtype)


def points(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def derivative_residuals(model: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Rows and residuals of |grad u|^2 = 1, which no layer call gives."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def residual(p: dict[str, Tensor], point: Tensor) -> Tensor:
        slope = grad(lambda q: functional_call(model, p, q).sum())(point)
        return slope.square().sum() - 1

    rows, residuals = vmap(grad_and_value(residual), (None, 0))(parameters, x)
    return list(rows.values()), residuals


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten().cpu().double() for t in tensors])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "options",
    [
        {"damping": 1e-6, "momentum": 0.0, "lr": 0.1},
        {"damping": 1e-2, "momentum": 0.9, "lr": 0.1},
        {"damping": 0.1, "momentum": 0.5, "max_norm": 0.1, "lr": 0.5},
    ],
)
def test_a_run_follows_the_reference(options, solver, device):
    model, twin = network(device), network()
    reference = ReferenceNaturalGradient(twin.parameters(), **options)
    optimizer = torchium.NaturalGradient(model, solver=solver, eps=1e-14, **options)
    start = flat(twin.parameters())
    for seed in range(4):
        x = points(12, seed)
        optimizer.zero_grad()
        optimizer.update_jacobian(*derivative_residuals(model, x.to(device)))
        rows, residuals = derivative_residuals(twin, x)
        for p, J in zip(twin.parameters(), rows, strict=True):
            p.grad = torch.tensordot(residuals, J, 1) / len(x)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-6, atol=1e-9)
        optimizer.step()
        reference.step_with(fisher(torch.cat([J.flatten(1) for J in rows], 1)))
        report = optimizer.report()
        assert (report["solver"], report["samples"], report["rows"]) == (solver, 12, 12)
    moved, expected = flat(model.parameters()) - start, flat(twin.parameters()) - start
    assert (moved - expected).norm() <= 1e-5 * expected.norm()


def test_without_damping_a_step_fits_a_linear_model(device):
    """Fewer points than parameters: the residuals vanish, at any scale."""
    x = torch.cat([points(4), points(4, seed=1)], 1).to(device)
    for scale in (1e-8, 1.0, 1e8):
        model = nn.Linear(4, 1).double().to(device)
        J, residuals = scale * x, scale * (model(x) - 3).detach()[:, 0]
        rows = [J[:, None, :], torch.full((4, 1), scale, dtype=torch.float64, device=device)]
        optimizer = torchium.NaturalGradient(model, lr=1.0, damping=1e-12 * scale**2, momentum=0)
        optimizer.update_jacobian(rows, residuals)
        optimizer.step()
        assert (model(x) - 3).abs().max() < 1e-8


def test_the_rows_of_layer_calls_give_the_same_step(device):
    """With residuals of one, J holds the gradients of the losses of the samples."""
    model = network(device)
    twin = copy.deepcopy(model)
    x = points(5).to(device)
    usual = torchium.NaturalGradient(twin, damping=0.1)
    usual.zero_grad()
    twin(x).square().mean().backward()
    usual.step()
    rows = torchium.per_sample_gradients(model, lambda u, _: u.square().mean(), x, x)
    optimizer = torchium.NaturalGradient(model, damping=0.1)
    optimizer.update_jacobian(list(rows.values()), torch.ones(5, device=device).double())
    optimizer.step()
    torch.testing.assert_close(
        flat(model.parameters()), flat(twin.parameters()), rtol=1e-10, atol=0
    )


def test_gradients_may_be_changed(device):
    """As by weight decay, or clipping."""
    model = network(device)
    rows, residuals = derivative_residuals(model, points(6).to(device))
    optimizer = torchium.NaturalGradient(model, lr=1.0, damping=0.1, momentum=0)
    optimizer.update_jacobian(rows, residuals)
    before = flat(model.parameters())
    for p in model.parameters():
        p.grad.mul_(0.5).add_(p.detach(), alpha=0.1)
    v = flat(p.grad for p in model.parameters())
    optimizer.step()
    matrix = (
        fisher(torch.cat([J.flatten(1).cpu() for J in rows], 1)) + 0.1 * torch.eye(len(v)).double()
    )
    expected = torch.linalg.solve(matrix, v)
    torch.testing.assert_close(before - flat(model.parameters()), expected, rtol=1e-8, atol=1e-10)


def test_it_replaces_what_was_captured_and_lasts_for_one_step():
    model = network()
    optimizer = torchium.NaturalGradient(model)
    x = points(6)
    model(x[:3]).square().mean().backward()
    optimizer.update_jacobian(*derivative_residuals(model, x))
    optimizer.update_jacobian(*derivative_residuals(model, x[:5]))
    optimizer.step()
    assert optimizer.report()["rows"] == 5
    with pytest.raises(ValueError, match="captured no backward pass"):
        optimizer.step()
    optimizer.zero_grad()
    model(x[:3]).square().mean().backward()
    optimizer.step()
    assert optimizer.report()["rows"] == 3
    optimizer.update_jacobian(*derivative_residuals(model, x))
    optimizer.zero_grad()
    model(x[:4]).square().mean().backward()
    optimizer.step()
    assert optimizer.report()["rows"] == 4


def test_any_module_will_do():
    """Also those that the capture of layers refuses."""
    model = nn.Sequential(nn.LSTM(2, 3), nn.BatchNorm1d(3)).double()
    optimizer = torchium.NaturalGradient(model.parameters(), lr=0.1)
    before = flat(model.parameters())
    rows = [torch.randn(4, *p.shape, dtype=torch.float64) for p in model.parameters()]
    optimizer.update_jacobian(rows, torch.ones(4))
    optimizer.step()
    assert (flat(model.parameters()) != before).all()


@pytest.mark.parametrize("fisher", ["ggn", "mc"])
def test_fisher_does_not_matter(fisher):
    results = []
    for kind in ("empirical", fisher):
        model = network()
        optimizer = torchium.NaturalGradient(model, fisher=kind)
        optimizer.update_jacobian(*derivative_residuals(model, points(6)))
        optimizer.step()
        results.append(flat(model.parameters()))
    assert torch.equal(*results)


def test_frozen_parameters_stay(device):
    model = network(device)
    model[0].weight.requires_grad_(False)
    start = flat([model[0].weight])
    optimizer = torchium.NaturalGradient(model.parameters())
    optimizer.update_jacobian(*derivative_residuals(model, points(6).to(device)))
    optimizer.step()
    assert model[0].weight.grad is None
    assert torch.equal(flat([model[0].weight]), start)


def test_residuals_that_are_not_finite_skip_the_step():
    model = network()
    optimizer = torchium.NaturalGradient(model)
    rows, residuals = derivative_residuals(model, points(6))
    before = flat(model.parameters())
    optimizer.update_jacobian(rows, residuals * torch.nan)
    optimizer.step()
    assert torch.equal(flat(model.parameters()), before)


@pytest.mark.parametrize("solver", ["gram", "explicit"])
def test_no_step_waits(solver, device):
    if device.type != "cuda":
        pytest.skip("a CPU has no waits")
    model = network(device)
    optimizer = torchium.NaturalGradient(model, solver=solver)
    x = points(8).to(device)
    for step in range(4):
        rows, residuals = derivative_residuals(model, x)
        if step < 2:
            optimizer.update_jacobian(rows, residuals)
            optimizer.step()
        else:
            with no_waits():
                optimizer.update_jacobian(rows, residuals)
                optimizer.step()


WRONG: dict[str, tuple[Any, str]] = {
    "fewer": (lambda J, r: (J[:3], r), "rows must be one tensor per parameter, got 3 for 4"),
    "shape": (
        lambda J, r: ([J[0].mT, *J[1:]], r),
        r"rows\[0\] must be Double\[6, 6, 2\] on cpu, got Double\[6, 2, 6\]",
    ),
    "dtype": (lambda J, r: ([J[0].float(), *J[1:]], r), r"rows\[0\] must be Double"),
    "samples": (lambda J, r: ([*J[:3], J[3][:5]], r), r"rows\[3\] must be .*\[6, 1\]"),
    "no_rows": (lambda J, r: ([j[:0] for j in J], r[:0]), r"rows\[0\] must be .*\[1, 6, 2\]"),
    "dict": (lambda J, r: (dict(enumerate(J)), r), r"rows is a dict; pass its values"),
    "no_tensor": (lambda J, r: ([1.0, *J[1:]], r), r"rows\[0\] must be a Tensor, got float"),
    "residuals": (lambda J, r: (J, r[:5]), r"residuals must be .* \[6\] on cpu, one for each row"),
    "residual_type": (lambda J, r: (J, r > 0), "residuals must be a real floating-point tensor"),
    "residual_list": (lambda J, r: (J, r.tolist()), "residuals must be a Tensor, got list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_change_nothing(case):
    change, message = WRONG[case]
    model = network()
    optimizer = torchium.NaturalGradient(model)
    with pytest.raises(ValueError, match=message):
        optimizer.update_jacobian(*change(*derivative_residuals(model, points(6))))
    assert all(p.grad is None for p in model.parameters())
    F.mse_loss(model(points(3)), torch.zeros(3, 1).double()).backward()
    optimizer.step()
    assert optimizer.report()["rows"] == 3


def test_a_kept_matrix_is_refused():
    model = network()
    optimizer = torchium.NaturalGradient(model, update_freq=2)
    with pytest.raises(ValueError, match=r"update_jacobian\(\) needs update_freq=1"):
        optimizer.update_jacobian(*derivative_residuals(model, points(6)))


@pytest.mark.parametrize("changed", ["rows", "residuals"])
def test_tensors_that_were_changed_are_refused(changed):
    model = network()
    optimizer = torchium.NaturalGradient(model)
    rows, residuals = derivative_residuals(model, points(6))
    optimizer.update_jacobian(rows, residuals)
    (rows[1] if changed == "rows" else residuals).mul_(2)
    before = flat(model.parameters())
    with pytest.raises(ValueError, match="changed in place before step"):
        optimizer.step()
    assert torch.equal(flat(model.parameters()), before)


@pytest.mark.parametrize("solver", SOLVERS)
def test_parameters_without_dimensions(solver, device):
    """As a coefficient of a differential equation that is fitted."""
    shapes = [(3, 2), (), (0,), (4,)]
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    params = [nn.Parameter(drawn(*shape)) for shape in shapes]
    start = flat(params)
    rows, residuals = [drawn(6, *shape) for shape in shapes], drawn(6)
    optimizer = torchium.NaturalGradient(
        params, lr=1.0, damping=0.1, momentum=0, solver=solver, eps=1e-14
    )
    optimizer.update_jacobian(rows, residuals)
    optimizer.step()
    J = torch.cat([row.reshape(6, -1) for row in rows[:2] + rows[3:]], 1).cpu()
    identity = torch.eye(J.shape[1], dtype=torch.float64)
    direction = torch.linalg.solve(J.T @ J / 6 + 0.1 * identity, J.T @ residuals.cpu() / 6)
    torch.testing.assert_close(start - flat(params), direction, rtol=1e-6, atol=1e-9)
