"""Conjugate gradients of NaturalGradient: tolerance, Nystrom preconditioner, and no waits on a GPU."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torchium
from cuda_waits import no_waits
from torch import Tensor, nn
from torch.nn import functional as F


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def problem(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """Inputs with a spectrum that decays fast, so that F has one too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 3))
    x = random(60, 20) * torch.logspace(1, -4, 20).double()
    return model.to(device, dtype), x.to(device, dtype)


def step(optimizer: torchium.NaturalGradient, model: nn.Module, x: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), torch.arange(len(x), device=x.device) % 3).backward()
    optimizer.step()


def movement(model: nn.Module, x: Tensor, **options) -> tuple[Tensor, dict]:
    twin = copy.deepcopy(model)
    optimizer = torchium.NaturalGradient(twin, lr=1.0, **options)
    step(optimizer, twin, x)
    moved = [p - q for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
    return torch.cat([m.detach().flatten() for m in moved]), optimizer.report()


@pytest.mark.parametrize("rank", [0, 1, 10, 40, 10**6])
@pytest.mark.parametrize("damping", [1e-5, 1e-2, 10.0])
def test_the_tolerance_is_reached(damping, rank, device):
    model, x = problem(device)
    exact, _ = movement(model, x, damping=damping, solver="explicit")
    options = dict(damping=damping, solver="cg", nystrom_rank=rank)
    for eps in (1e-3, 1e-9):
        found, report = movement(model, x, eps=eps, **options)
        assert 0 < report["iterations"] < 260
        assert report["relative_residual"] <= eps
    assert (found - exact).norm() <= 1e-9 * 10 / damping * exact.norm()


def test_the_preconditioner_saves_iterations(device):
    model, x = problem(device)
    counts = {}
    for rank in (0, 10, 40):
        _, report = movement(model, x, damping=1e-5, solver="cg", nystrom_rank=rank)
        counts[rank] = report["iterations"]
    assert counts[10] < 0.75 * counts[0]
    assert counts[40] < 0.4 * counts[0]


def test_the_preconditioned_condition_number_is_that_of_the_paper():
    """lambda_r + 1, with lambda the spectrum of F / damping: the classical bound of the iterations holds."""
    damping, rank = 1e-4, 15
    x = random(50, 30) * torch.logspace(0, -4, 30).double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(30, 1, bias=False).double()
    J = 2 * model(x).detach() * x  # of the loss f^2
    spectrum = torch.linalg.eigvalsh(J.mT @ J / len(x)).flip(0) / damping
    twin = copy.deepcopy(model)
    optimizer = torchium.NaturalGradient(
        twin, lr=1.0, damping=damping, solver="cg", nystrom_rank=rank, eps=1e-10
    )
    twin(x).square().mean().backward()
    optimizer.step()
    condition = float(spectrum[rank - 3] + 1)  # oversampled by three
    bound = 1 + condition**0.5 / 2 * math.log(2 * (1 + float(spectrum[0])) ** 0.5 / 1e-10)
    assert bound < 20  # it takes 27 iterations without the preconditioner
    assert optimizer.report()["iterations"] <= bound


@pytest.mark.parametrize("options", [{}, {"momentum": 0.0, "update_freq": 3}])
@pytest.mark.parametrize("rank", [0, 8])
def test_groups_with_other_dampings(rank, options, device):
    results = []
    for solver in ("gram", "cg"):
        model, x = problem(device)
        groups = [
            {"params": model[0].parameters(), "damping": 1e-3},
            {"params": model[2].parameters(), "damping": 0.1},
        ]
        optimizer = torchium.NaturalGradient(
            groups, lr=0.1, solver=solver, nystrom_rank=rank, eps=1e-12, **options
        )
        for _ in range(5):
            step(optimizer, model, x)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("rank", [0, 10])
def test_float32(rank, device):
    model, x = problem(device, torch.float32)
    exact, _ = movement(model.double(), x.double(), damping=1e-2, solver="explicit")
    found, report = movement(model.float(), x, damping=1e-2, solver="cg", nystrom_rank=rank)
    assert report["relative_residual"] <= 4 * torch.finfo(torch.float32).eps
    assert (found - exact).norm() <= 2e-3 * exact.norm()


def test_the_sketch_is_the_same_in_every_run():
    model, x = problem(torch.device("cpu"))
    state = torch.get_rng_state()
    runs = [movement(model, x, solver="cg", nystrom_rank=5)[0] for _ in range(2)]
    assert torch.equal(*runs)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_gradient_of_zero_stays(device):
    model, x = problem(device)
    optimizer = torchium.NaturalGradient(model, solver="cg", nystrom_rank=3)
    start = [p.detach().clone() for p in model.parameters()]
    (model(x) * 0.0).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, start, model.parameters()))
    assert optimizer.report()["iterations"] == 0


@pytest.mark.parametrize("rank", [0, 10])
def test_no_step_waits(rank, device):
    if device.type != "cuda":
        pytest.skip("a CPU has no waits")
    model, x = problem(device, torch.float32)
    optimizer = torchium.NaturalGradient(model, lr=0.01, solver="cg", nystrom_rank=rank)
    step(optimizer, model, x)  # creates the state
    for _ in range(4):
        torch.cuda.synchronize()  # the last count has arrived
        with no_waits():
            step(optimizer, model, x)
    report = optimizer.report()
    assert report["relative_residual"] <= 4 * torch.finfo(torch.float32).eps


def test_too_few_iterations_are_doubled(device):
    """After easy steps, a hard one: reported, and made up for within a few steps."""
    if device.type != "cuda":
        pytest.skip("a CPU stops where the tolerance is reached")
    model, x = problem(device)
    optimizer = torchium.NaturalGradient(model, lr=0.0, momentum=0.0, damping=100.0, solver="cg")
    for _ in range(3):
        step(optimizer, model, x)
        torch.cuda.synchronize()
    few = optimizer.report()["iterations"]
    optimizer.param_groups[0]["damping"] = 1e-5
    step(optimizer, model, x)
    assert optimizer.report()["relative_residual"] > 1e-8
    assert optimizer.report()["iterations"] <= few + few // 4 + 8
    for _ in range(6):
        step(optimizer, model, x)
        torch.cuda.synchronize()
    assert optimizer.report()["relative_residual"] <= 1e-8


@pytest.mark.parametrize("value", [-1, 1.5, "ten"])
def test_a_wrong_rank_is_refused(value):
    with pytest.raises(ValueError, match="nystrom_rank must be an integer of at least 0"):
        torchium.NaturalGradient(nn.Linear(2, 2), nystrom_rank=value)
