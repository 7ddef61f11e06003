"""The solvers of torchium.KFAC, against inverses of its factors in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchium
from torch import Tensor, nn
from torch.nn import functional as F

SOLVERS = ["auto", "eigh", "cholesky", "newton"]


def after_one_step(
    dtype: torch.dtype, device: Any, samples: int = 64, **options: Any
) -> dict[str, Tensor]:
    """State of a layer with inputs of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(20, 6)
    with torch.no_grad():
        model.weight.copy_(torch.randn(6, 20, generator=generator))
        model.bias.zero_()
    model.to(device, dtype)
    optimizer = torchium.KFAC(model, lr=0.1, kl_clip=None, **options)
    x = torch.randn(samples, 20, generator=generator) * torch.logspace(0, -2, 20)
    targets = torch.arange(samples, device=device) % 6
    F.cross_entropy(model(x.to(device, dtype)), targets).backward()
    optimizer.step()
    return optimizer.state[model.weight]


def damped(state: dict[str, Tensor], damping: float, split: str) -> dict[str, Tensor]:
    """A + pi sqrt(damping) I and G + sqrt(damping) / pi I of the stored factors, in float64."""
    A, G = (state[key][0].double().cpu() for key in ("A", "G"))
    pi = math.sqrt(A.diagonal().mean() / G.diagonal().mean()) if split == "pi" else 1.0
    root = math.sqrt(damping)
    return {
        "A": A + pi * root * torch.eye(len(A), dtype=A.dtype),
        "G": G + root / pi * torch.eye(len(G), dtype=G.dtype),
    }


@pytest.mark.parametrize("damping", [1e-6, 1e-2])
@pytest.mark.parametrize("split", ["pi", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", SOLVERS)
def test_inverses_are_as_accurate_as_those_of_lapack(solver, dtype, split, damping, device):
    """A backward stable inverse has an error of at most about n eps times the condition number."""
    state = after_one_step(dtype, device, damping=damping, damping_split=split, solver=solver)
    for key, matrix in damped(state, damping, split).items():
        exact = torch.linalg.inv(matrix)
        error = (state[f"{key}_inverse"][0].double().cpu() - exact).norm() / exact.norm()
        of_lapack = (torch.linalg.inv(matrix.to(dtype)).double() - exact).norm() / exact.norm()
        noise = len(matrix) * torch.finfo(dtype).eps * torch.linalg.cond(matrix)
        assert error <= max(20 * of_lapack, noise)


def test_solvers_take_different_paths():
    """All round differently; auto is Cholesky on the CPU."""
    inverses = {
        solver: after_one_step(torch.float32, "cpu", solver=solver)["A_inverse"]
        for solver in SOLVERS
    }
    assert torch.equal(inverses["auto"], inverses["cholesky"])
    for first, second in [("eigh", "cholesky"), ("eigh", "newton"), ("cholesky", "newton")]:
        assert not torch.equal(inverses[first], inverses[second])


@pytest.mark.parametrize("damping", [1e-18, 1e-14])
def test_a_lost_pivot_is_left_to_eigenvalues_on_the_cpu(damping):
    """Three samples, and a damping below the rounding error of the largest eigenvalue.

    With the smaller one a pivot is negative, with the other one positive but nothing but rounding errors.
    """
    options = {"samples": 3, "damping": damping, "damping_split": "plain"}
    states = {
        solver: after_one_step(torch.float32, "cpu", solver=solver, **options)
        for solver in ("cholesky", "eigh")
    }
    assert states["cholesky"]["root_failures"].tolist() == [0, 0]
    assert torch.equal(states["cholesky"]["A_inverse"], states["eigh"]["A_inverse"])


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_factor_that_is_not_finite_leaves_the_inverses(solver, device):
    state = after_one_step(torch.float32, device, solver=solver, TInv=1, TCov=100)
    assert state["root_failures"].tolist() == [0, 0]
    model = nn.Linear(20, 6).to(device)
    optimizer = torchium.KFAC(model, lr=0.1, solver=solver, TInv=1, TCov=100)
    for step in range(2):
        optimizer.zero_grad()
        F.cross_entropy(
            model(torch.randn(8, 20, device=device)), torch.zeros(8, device=device).long()
        ).backward()
        if step == 1:
            before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
            optimizer.state[model.weight]["G"].fill_(math.nan)
        optimizer.step()
    after = optimizer.state[model.weight]
    assert after["root_failures"].tolist() == [0, 1]
    for key in ("A_inverse", "G_inverse"):
        assert torch.equal(before[key], after[key])


@pytest.mark.parametrize("solver", ["cholesky", "newton"])
def test_exact_damping_needs_eigenvectors(solver):
    message = f"solver='{solver}' has no eigenvectors, which damping_split='exact' needs"
    with pytest.raises(ValueError, match=message):
        torchium.KFAC(nn.Linear(2, 2), damping_split="exact", solver=solver)
