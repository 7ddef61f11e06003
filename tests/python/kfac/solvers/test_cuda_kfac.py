"""K-FAC's kernels for inverses, for K and C, and for the diagonals of sums, against float64 on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchium
from cuda_waits import no_waits
from torch import Tensor, nn

pytestmark = pytest.mark.cuda


def perceptron() -> nn.Module:
    """Factors of orders 41 to 200, with and without a bias; two layers of one shape."""
    layers = [
        nn.Linear(40, 200),
        nn.Linear(200, 96, bias=False),
        nn.Linear(96, 96),
        nn.Linear(96, 96),
    ]
    return nn.Sequential(
        *(part for layer in layers for part in (layer, nn.Tanh())), nn.Linear(96, 10)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 40, 3, padding=1), nn.Tanh()),
        *(nn.Conv2d(40, 64, 3, stride=2, groups=2), nn.Tanh()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


MODELS = {"perceptron": (perceptron, (40,)), "convolutions": (convolutions, (3, 12, 12))}


def batch(shape: tuple[int, ...], step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(128, *shape, generator=generator, dtype=torch.double)
    return x, torch.randint(10, (128,), generator=generator)


def train(model: nn.Module, optimizer: torchium.KFAC, shape: tuple[int, ...], steps: range) -> None:
    parameter = next(model.parameters())
    for step in steps:
        x, y = batch(shape, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(parameter)), y.to(parameter.device)).backward()
        optimizer.step()
    optimizer.check_errors()


def relative_change(model: nn.Module, reference: nn.Module, start: nn.Module) -> float:
    """The distance of two models, in units of the way of the second."""
    ways = [
        torch.cat([(p.detach().cpu().double() - q.double()).flatten() for p, q in
                   zip(each.parameters(), start.parameters(), strict=True)])
        for each in (model, reference)
    ]  # fmt: skip
    return ((ways[0] - ways[1]).norm() / ways[1].norm()).item()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "structures", [("dense", "dense"), ("dense", "diagonal"), ("diagonal", "dense")]
)
@pytest.mark.parametrize("alpha1", [0.0, 0.5])
def test_k_and_c_follow_float64(name: str, structures: tuple[str, str], alpha1: float) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    start = make()
    results = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        model = copy.deepcopy(start).to(device, dtype)
        optimizer = torchium.KFAC(
            model, solver="inverse_free", structures=structures, TCov=2, alpha1=alpha1, lr=0.05
        )
        train(model, optimizer, shape, range(6))
        results.append(model)
    assert relative_change(*results, start) < 2e-4


def test_directions_follow_k_and_c_that_are_replaced_or_changed() -> None:
    """Their squares are kept, but never longer than they."""
    torch.manual_seed(0)
    start = perceptron().cuda()
    options: dict[str, Any] = {"solver": "inverse_free", "TCov": 100, "lr": 0.05}

    def trained(change: str) -> nn.Module:
        model = copy.deepcopy(start)
        optimizer = torchium.KFAC(model, **options)
        train(model, optimizer, (40,), range(3))
        if change == "loaded":
            saved = copy.deepcopy(optimizer.state_dict())
            for state in saved["state"].values():
                for key in ("K", "C"):
                    if key in state:
                        state[key] *= 2
            optimizer.load_state_dict(saved)
        elif change == "in place":
            for state in optimizer.state.values():
                for key in ("K", "C"):
                    if key in state:
                        state[key].mul_(2)
        elif change == "set":
            for state in optimizer.state.values():
                for key in ("K", "C"):
                    if key in state:
                        state[key] = state[key] * 2
        train(model, optimizer, (40,), range(3, 5))
        return model

    ways = {
        change: torch.cat([p.detach().flatten() for p in trained(change).parameters()])
        for change in ("none", "loaded", "in place", "set")
    }
    torch.testing.assert_close(ways["in place"], ways["loaded"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ways["set"], ways["loaded"], rtol=1e-5, atol=1e-6)
    assert (ways["in place"] - ways["none"]).norm() > 1e-3 * ways["none"].norm()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_inverses_of_several_steps_follow_float64(name: str, precision: str) -> None:
    """The fp16 numbers of inverses are kept until the next ones."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    start = make()
    results = []
    before = torch.get_float32_matmul_precision()
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        model = copy.deepcopy(start).to(device, dtype)
        optimizer = torchium.KFAC(model, TCov=1, TInv=3, lr=0.05, damping=0.1)
        train(model, optimizer, shape, range(4))
        if device == "cuda":
            torch.set_float32_matmul_precision(precision)
        try:
            train(model, optimizer, shape, range(4, 8))
        finally:
            torch.set_float32_matmul_precision(before)
        results.append(model)
    assert relative_change(*results, start) < (2e-4 if precision == "highest" else 2e-2)


def test_an_inverse_that_is_changed_in_place_counts_from_the_next_step() -> None:
    torch.manual_seed(0)
    start = perceptron().cuda()
    ways = []
    for factor in (1.0, 3.0):
        model = copy.deepcopy(start)
        optimizer = torchium.KFAC(model, TCov=100, TInv=100, lr=0.01, kl_clip=None, momentum=0.0)
        train(model, optimizer, (40,), range(3))
        for state in optimizer.state.values():
            if "A_inverse" in state:
                state["A_inverse"].mul_(factor)
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, (40,), range(3, 4))
        changes = [p.detach() - q for p, q in zip(model.parameters(), before, strict=True)]
        ways.append(torch.cat([change.flatten() for change in changes]))
    torch.testing.assert_close(ways[1], 3 * ways[0], rtol=1e-3, atol=1e-5)


def test_steps_without_inverses_do_not_wait() -> None:
    model = perceptron().cuda()
    optimizer = torchium.KFAC(model, solver="inverse_free", TCov=2, lr=0.01)
    x, y = (t.cuda() for t in batch((40,), 0))
    x = x.float()
    for step in range(8):
        with no_waits() if step > 3 else torch.no_grad(), torch.enable_grad():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf, 1e30])
def test_a_factor_that_is_not_finite_skips_the_step(bad: float) -> None:
    """Its gradient is finite."""
    torch.manual_seed(0)
    model = nn.Linear(70, 33).cuda()
    optimizer = torchium.KFAC(model, TCov=1, TInv=1, lr=0.1)
    before = model.weight.detach().clone()
    x = torch.randn(16, 70, device="cuda")
    x[3, 5] = bad
    model(x).tanh().sum().backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(before, model.weight) == (bad != 0.0)


@pytest.mark.parametrize(
    ("scale", "damping"),
    [(1e-12, 1e-8), (1e-12, 10.0), (1e-4, 1e-8), (1e-4, 1e-3), (1e-2, 1e-3), (1.0, 10.0)],
)
@pytest.mark.parametrize("solver", ["auto", "newton"])
def test_every_factor_has_its_own_damping(scale: float, damping: float, solver: str) -> None:
    """(F + s I) X = I with s = pi^+-1 sqrt(damping)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(63, 300), nn.Linear(300, 300), nn.Linear(300, 20)).cuda()
    optimizer = torchium.KFAC(model, TCov=1, TInv=1, damping=damping, solver=solver, lr=0.0)
    x = torch.randn(400, 63, device="cuda")
    (scale * model(x)).pow(2).sum().backward()
    optimizer.step()
    optimizer.check_errors()
    for layer in model:
        state = optimizer.state[layer.weight]
        A, G = state["A"].double(), state["G"].double()

        def mean(F: Tensor) -> Tensor:
            return F.diagonal(0, -2, -1).mean().clamp_min(1e-8)

        pi = (mean(A) / mean(G)).sqrt()
        for F_, s, X in (
            (A, pi * damping**0.5, state["A_inverse"]),
            (G, damping**0.5 / pi, state["G_inverse"]),
        ):
            eye = torch.eye(F_.shape[-1], device="cuda", dtype=torch.double)
            s = s.clamp_min(1e-8)
            residual = ((F_ + s * eye) @ X.double() - eye).norm() / eye.norm()
            assert residual < 1e-4 + 1e-5 * (F_.norm() / s)


@pytest.mark.parametrize(("size", "count"), [(576, 40000), (256, 65536), (1152, 5001), (3072, 700)])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e12])
def test_second_moments_of_float32(size: int, count: int, scale: float) -> None:
    """Those with many multiplications go to tensor cores, with 22 bits of every element."""
    torch.manual_seed(0)
    model = nn.Linear(size, 1, bias=False).cuda()
    optimizer = torchium.KFAC(model, TCov=1, batch_averaged=False, lr=0.0)
    x = scale * torch.randn(count, size, device="cuda") * torch.logspace(0, -3, size, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    A = optimizer.state[model.weight]["A"][0]
    expected = x.double().T @ x.double() / count
    assert torch.equal(A, A.T)
    assert (A - expected).norm() < 1e-6 * expected.norm()
    diagonal = expected.diagonal()
    assert ((A.diagonal() - diagonal) / diagonal).abs().max() < 1e-5


def test_a_first_step_that_is_known_late_to_be_skipped():
    """The second step makes the first factors then, and later ones invert them."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 4).cuda(), torch.randn(16, 6, device="cuda")
    optimizer = torchium.KFAC(model, lr=0.1, damping_split="plain", TCov=1, TInv=100)
    torch.cuda._sleep(10**9)
    for step in range(3):
        optimizer.zero_grad()
        (model(x).square().mean() * (float("nan") if step == 0 else 1.0)).backward()
        optimizer.step()
        if step == 1:
            torch.cuda.synchronize()
    state = optimizer.state[model.weight]
    assert int(state["factor_updates"]) == 2
    assert (state["A_inverse"][0] - torch.eye(7, device="cuda")).abs().max() > 1e-2
