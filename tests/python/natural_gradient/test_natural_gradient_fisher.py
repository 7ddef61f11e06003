"""NaturalGradient with fisher="ggn" and "mc": the curvature of the loss, by update_curvature().

Against dense float64 Gauss-Newton matrices by torch.func, PyTorch's Hessians, and curvlinops.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchium
from captured_layers import MODELS, model_and_batch
from combinations import in_turn
from cuda_waits import no_waits
from curvature_losses import FISHERS, LOSSES, losses
from reference import ReferenceNaturalGradient, gauss_newton
from torch import Tensor, nn
from torch.nn import functional as F

SOLVERS = ["gram", "explicit", "cg"]
NAMES = sorted(MODELS.keys() - {"two_tables"})


def dense_ggn(model: nn.Module, x: Tensor, loss: str) -> Tensor:
    """[P, P], with J by torch.func and the Hessians of torch's loss of every sample."""
    function, target = LOSSES[loss]
    named = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, x))(named)
    f = model(x).detach()
    J = torch.cat([j.flatten(2) for j in jacobians.values()], 2)
    y = target(f)
    H = [
        torch.autograd.functional.hessian(lambda o, i=i: function(o[None], y[i : i + 1]), f[i])
        for i in range(len(f))
    ]
    return gauss_newton(J, torch.stack(H))


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten().cpu().double() for t in tensors])


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def assert_near(ours: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.norm() > 0
    assert (ours - expected).norm() <= tolerance * expected.norm()


def backward(
    optimizer: Any, model: nn.Module, x: Tensor, loss: str = "cross_entropy", **options: Any
) -> None:
    function, target = LOSSES[loss]
    optimizer.zero_grad()
    outputs = model(x)
    optimizer.update_curvature(outputs, loss, **options)
    function(outputs, target(outputs)).backward()


def train(optimizer: Any, model: nn.Module, name: str, steps: int, first: int = 0) -> None:
    p = next(model.parameters())
    for seed in range(first, first + steps):
        x, _ = model_and_batch(name, seed=seed, device=p.device, dtype=p.dtype)[1]
        generator = torch.Generator(p.device).manual_seed(seed)
        backward(optimizer, model, x, generator=generator)
        optimizer.step()


# ---- against dense matrices


@losses
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_direction_is_the_dense_solve(name, solver, loss, device):
    model, (x, _) = model_and_batch(name, samples=4, device=device)
    damping, before = 1e-2, flat(trained(model))
    matrix = dense_ggn(copy.deepcopy(model).cpu(), x.cpu(), loss)
    optimizer = torchium.NaturalGradient(
        model, lr=1.0, damping=damping, solver=solver, fisher="ggn", eps=1e-13
    )
    backward(optimizer, model, x, loss)
    v = flat(p.grad for p in trained(model))
    optimizer.step()
    expected = torch.linalg.solve(matrix + damping * torch.eye(len(v)).double(), v)
    assert_near(before - flat(trained(model)), expected, 1e-8)
    report = optimizer.report()
    assert (report["solver"], report["samples"]) == (solver, 4)
    assert report["rows"] == 4 * model(x)[0].numel()


OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "update_freq": {"update_freq": 3, "momentum": 0.0},
    "update_freq_momentum": {"update_freq": 2, "momentum": 0.5, "max_norm": 0.3},
}


@pytest.mark.parametrize(
    ("name", "options", "solver"),
    in_turn(["mlp", "convolutions", "tied_embedding"], OPTIONS, SOLVERS),
)
def test_a_run_follows_the_reference(name, options, solver, device):
    settings = {"lr": 0.1, "damping": 0.1, **OPTIONS[options]}
    model, _ = model_and_batch(name, device=device)
    twin = model_and_batch(name)[0]
    before = flat(twin.parameters())
    reference = ReferenceNaturalGradient(twin.parameters(), **settings)
    optimizer = torchium.NaturalGradient(model, solver=solver, fisher="ggn", eps=1e-13, **settings)
    for seed in range(5):
        x, _ = model_and_batch(name, seed=seed)[1]
        backward(optimizer, model, x.to(device))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.cpu()
        optimizer.step()
        reference.step_with(dense_ggn(twin, x, "cross_entropy"))
    assert_near(flat(model.parameters()) - before, flat(twin.parameters()) - before, 1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_step_solves_linear_regression(solver, device):
    model = nn.Linear(4, 3).double().to(device)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, k, generator=generator).double().to(device) for k in (4, 3))
    optimizer = torchium.NaturalGradient(
        model, lr=1.0, damping=1e-10, momentum=0, fisher="ggn", solver=solver, eps=1e-14
    )
    outputs = model(x)
    optimizer.update_curvature(outputs, "mse")
    F.mse_loss(outputs, y).backward()
    optimizer.step()
    with_ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    solution = torch.linalg.lstsq(with_ones, y).solution
    assert_near(flat([model.weight.mT, model.bias]), flat([solution]), 1e-5)


def test_a_step_of_a_linear_classifier_is_one_of_newton(device):
    """Its Gauss-Newton matrix is the Hessian."""
    model, damping = nn.Linear(4, 3).double().to(device), 1e-4
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double().to(device)
    y = torch.arange(12, device=device) % 3

    def loss(theta: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, theta[:12].view(3, 4), theta[12:]), y)

    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    H = torch.autograd.functional.hessian(loss, theta)
    v = torch.autograd.functional.jacobian(loss, theta)
    newton = torch.linalg.solve(H + damping * torch.eye(15).to(H), v)
    optimizer = torchium.NaturalGradient(model, lr=1.0, damping=damping, fisher="ggn")
    backward(optimizer, model, x)
    optimizer.step()
    assert_near(flat([theta]) - flat(model.parameters()), flat([newton]), 1e-9)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("name", ["mlp", "convolutions"])
def test_directions_agree_with_curvlinops(name, loss):
    curvlinops = pytest.importorskip("curvlinops")
    model, (x, y) = model_and_batch(name)
    loss_fn: nn.Module = nn.CrossEntropyLoss()
    if loss == "mse":
        loss_fn, y = nn.MSELoss(), LOSSES["mse"][1](model(x).detach())
    params, damping = list(model.parameters()), 0.01
    operator = curvlinops.GGNLinearOperator(model, loss_fn, params, [(x, y)])
    before = flat(params)
    optimizer = torchium.NaturalGradient(model, lr=1.0, damping=damping, fisher="ggn")
    outputs = model(x)
    optimizer.update_curvature(outputs, loss)
    loss_fn(outputs, y).backward()
    v = [p.grad for p in params]
    matvec = [p.detach().clone() for p in params]
    optimizer.step()
    d = before - flat(params)
    first = 0
    parts = []
    for p in params:
        parts.append(d[first : first + p.numel()].view_as(p))
        first += p.numel()
    with torch.no_grad():  # the operator reads the parameters
        for p, old in zip(params, matvec, strict=True):
            p.copy_(old)
    assert_near(flat(operator @ parts) + damping * d, flat(v), 1e-6)


# ---- sampled targets


@losses
def test_sampled_targets_have_the_curvature_as_mean(loss, device):
    """With a large damping D the direction is v / D - F v / D^2: its error is that of F."""
    directions = {}
    for fisher, samples in [("ggn", 1), ("mc", 20), ("mc", 2000)]:
        model, (x, _) = model_and_batch("mlp", samples=4, device=device)
        optimizer = torchium.NaturalGradient(
            model, lr=1.0, damping=1e3, fisher=fisher, solver="explicit"
        )
        before = flat(model.parameters())
        generator = torch.Generator(device).manual_seed(3)
        backward(optimizer, model, x, loss, samples=samples, generator=generator)
        v = flat(p.grad for p in model.parameters())
        optimizer.step()
        directions[fisher, samples] = v - 1e3 * (before - flat(model.parameters()))
        assert optimizer.report()["rows"] == 4 * (samples if fisher == "mc" else 3)
    exact = directions.pop(("ggn", 1))
    for (_, samples), found in directions.items():
        assert 0 < (found - exact).norm() < 4 / samples**0.5 * exact.norm()


# ---- the passes


@pytest.mark.parametrize("first", ["update", "backward"])
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_loss_alone(name, fisher, first, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # two runs are compared
    gradients = []
    for with_curvature in (False, True):
        model, (x, y) = model_and_batch(name, device=device)
        optimizer = torchium.NaturalGradient(model, fisher=fisher)
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        if with_curvature and first == "update":
            optimizer.update_curvature(outputs, "cross_entropy")
            assert all(p.grad is None for p in trained(model))
        loss.backward(retain_graph=first == "backward")
        if with_curvature and first == "backward":
            optimizer.update_curvature(outputs, "cross_entropy")
        gradients.append([p.grad for p in trained(model)])
        if with_curvature:
            optimizer.step()
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["mlp", "shared_everywhere", "tied_embedding"])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 5, 2)])
def test_micro_batches_equal_one_batch(name, sizes, solver, device):
    results = []
    for pieces in (sizes, (8,)):
        model, (x, y) = model_and_batch(name, samples=8, device=device)
        optimizer = torchium.NaturalGradient(
            model, damping=0.1, solver=solver, fisher="ggn", eps=1e-13
        )
        for _ in range(2):
            optimizer.zero_grad()
            for part_x, part_y in zip(x.split(pieces), y.split(pieces), strict=True):
                outputs = model(part_x)
                optimizer.update_curvature(outputs, "cross_entropy")
                (F.cross_entropy(outputs, part_y) * len(part_x) / len(x)).backward()
            optimizer.step()
        results.append(flat(model.parameters()))
        assert optimizer.report()["samples"] == 8
    assert_near(*results, 1e-10)


@pytest.mark.parametrize("fisher", FISHERS)
def test_a_resumed_run_reports_the_samples_of_the_kept_batch(fisher, device):
    """Its state has a layer call for each column of the curvature, and so more rows than samples."""
    columns = 2 if fisher == "mc" else 3
    runs = []
    for samples in (8, 5):
        model, (x, _) = model_and_batch("mlp", samples=samples, device=device)
        optimizer = torchium.NaturalGradient(model, fisher=fisher, update_freq=3, damping=1.0)
        runs.append((optimizer, model, x))

    def step(run: tuple[Any, nn.Module, Tensor]) -> tuple[int, int]:
        backward(*run, samples=2)
        run[0].step()
        report = run[0].report()
        return report["samples"], report["rows"]

    uninterrupted, resumed = runs
    assert step(uninterrupted) == step(uninterrupted) == (8, 8 * columns)
    assert step(resumed) == (5, 5 * columns)
    resumed[1].load_state_dict(uninterrupted[1].state_dict())
    resumed[0].load_state_dict(uninterrupted[0].state_dict())
    assert step(resumed) == step(uninterrupted) == (8, 8 * columns)
    assert step(resumed) == (5, 5 * columns)


def test_an_input_changed_in_place_before_the_step_is_an_error(device):
    model = nn.Linear(4, 3).to(device)
    optimizer = torchium.NaturalGradient(model, fisher="ggn")
    x = torch.ones(2, 4, device=device)
    outputs = model(x)
    optimizer.update_curvature(outputs, "mse")
    outputs.sum().backward()
    x += 1
    with pytest.raises(ValueError, match=r"linear layer was changed in place"):
        optimizer.step()


def test_a_parameter_that_the_outputs_do_not_reach_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    optimizer = torchium.NaturalGradient(model, fisher="ggn")
    hidden = model[0](torch.ones(2, 4))
    optimizer.update_curvature(hidden, "mse")
    model[1](hidden).sum().backward()
    with pytest.raises(ValueError, match=r"gradient of parameter '1.weight'"):
        optimizer.step()


def test_mixed_samples_are_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False))
    optimizer = torchium.NaturalGradient(model, fisher="ggn")
    backward(optimizer, model, torch.randn(5, 4), "mse")
    with pytest.raises(ValueError, match="normalised with the statistics of the batch"):
        optimizer.step()


def test_curvature_does_not_wait(device):
    if device.type != "cuda":
        pytest.skip("a CPU has no waits")
    model, (x, y) = model_and_batch("mlp", dtype=torch.float32, device=device)
    for fisher in FISHERS:
        optimizer = torchium.NaturalGradient(model, fisher=fisher, solver="gram")
        for step in range(4):
            optimizer.zero_grad()
            outputs = model(x)
            if step == 3:
                with no_waits():
                    optimizer.update_curvature(outputs, "cross_entropy")
                    F.cross_entropy(outputs, y).backward()
                    optimizer.step()
            else:
                optimizer.update_curvature(outputs, "cross_entropy")
                F.cross_entropy(outputs, y).backward()
                optimizer.step()


# ---- the option


@pytest.mark.parametrize("fisher", FISHERS)
def test_the_option_may_change_in_mid_run(fisher, device):
    model, (x, y) = model_and_batch("mlp", device=device)
    optimizer = torchium.NaturalGradient(model)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.param_groups[0]["fisher"] = fisher
    train(optimizer, model, "mlp", 2)
    optimizer.param_groups[0]["fisher"] = "empirical"
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.report()["rows"] == 5
