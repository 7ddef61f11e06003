"""Roots stored in bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
import torchium
from optimizer_cases import assert_same, mlp, run
from parity_tools import make, state_of
from torch import nn
from trajectory_problems import train

BFLOAT16 = {"root_dtype": torch.bfloat16}
# Small matrices that are joined, large ones alone, and a power that is not a root.
CASES = [
    {"lr": 0.1, "eps": 1e-2},
    {"lr": 0.1, "eps": 1e-2, "root_method": "eigh", "betas": (0.9, 0.95), "grafting": "adam"},
    {"lr": 0.1, "eps": 1e-2, "exponent": -0.3, "preconditioner_1d": "full"},
]


def roots(optimizer: torchium.Shampoo) -> list[torch.Tensor]:
    states = optimizer.state.values()
    return [value for state in states for key, value in state.items() if key.startswith("roots")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", CASES)
def test_roots_are_those_of_the_statistics_rounded(device, dtype, options):
    optimizers = []
    for kept in ({}, BFLOAT16):
        model = mlp(device).to(dtype)
        optimizer = torchium.Shampoo(model.parameters(), update_freq=1, **options, **kept)
        run(model, optimizer, 0, 1)  # the first statistics do not depend on roots
        optimizers.append(optimizer)
    exact, rounded = map(roots, optimizers)
    assert len(exact) == len(rounded) > 0
    for a, b in zip(exact, rounded, strict=True):
        assert a.dtype == dtype
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.to(torch.bfloat16), b)


@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (160, 320), (1024, 1024)])
def test_directions_are_products_with_the_rounded_roots(device, rows, columns):
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(rows, columns, generator=generator)
    p = nn.Parameter(torch.zeros(rows, columns, device=device))
    p.grad = gradient.to(device)
    optimizer = torchium.Shampoo([p], lr=1.0, eps=1e-2, matmul_precision="highest", **BFLOAT16)
    optimizer.step()
    left, right = (root[0].double().cpu() for root in roots(optimizer))
    expected = left @ gradient.double() @ right
    error = (p.detach().cpu().double() + expected).norm() / expected.norm()
    assert error < 1e-5


def test_training_follows_that_with_whole_roots(device):
    ends = []
    for kept in ({}, BFLOAT16):
        model = mlp(device)
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torchium.Shampoo(model.parameters(), lr=0.02, eps=0.1, update_freq=3, **kept)
        ends.append(run(model, optimizer, 0, 12))
    for s, whole, rounded in zip(start, *ends, strict=True):
        assert (rounded - whole).norm() < 0.01 * (whole - s).norm()
        assert s.dim() < 2 or not torch.equal(rounded, whole)


def test_a_failed_root_keeps_every_bit(device):
    model = mlp(device)
    optimizer = torchium.Shampoo(model.parameters(), update_freq=1, **BFLOAT16)
    run(model, optimizer)
    state = optimizer.state[model[0].weight]
    before = state["roots.0"].clone()
    assert not torch.equal(before[0], torch.eye(len(before[0]), dtype=before.dtype, device=device))
    state["statistics.0"].fill_(torch.nan)
    run(model, optimizer, 4, 1)
    assert torch.equal(state["roots.0"], before)
    assert state["root_failures.0"].tolist() == [1]


def test_roots_beyond_bfloat16_stay_finite(device):
    """The largest float32 rounds to infinity in bfloat16."""
    p = nn.Parameter(torch.zeros(1, 1, device=device))
    p.grad = torch.full((1, 1), 1e-19, device=device)
    options = {"eps": 0.0, "exponent": -1.0, "root_method": "eigh"}
    optimizer = torchium.Shampoo([p], lr=1e-30, **options, **BFLOAT16)
    optimizer.step()
    optimizer.check_errors()
    assert all(torch.isfinite(root).all() for root in roots(optimizer))
    assert torch.isfinite(p).all()


def test_a_changed_option_converts_the_roots():
    model = mlp()
    optimizer = torchium.Shampoo(model.parameters(), update_freq=10**6)
    run(model, optimizer, 0, 8)
    before = roots(optimizer)
    optimizer.param_groups[0]["root_dtype"] = "bfloat16"
    run(model, optimizer, 8, 1)  # no root is due at step 9
    assert_same(roots(optimizer), [root.bfloat16() for root in before])


def test_a_checkpoint_continues_bit_for_bit(device):
    model, other = mlp(device), mlp(device)
    optimizer = torchium.Shampoo(model.parameters(), update_freq=3, **BFLOAT16)
    run(model, optimizer)
    other.load_state_dict(model.state_dict())
    resumed = torchium.Shampoo(other.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {root.dtype for root in roots(resumed)} == {torch.bfloat16}
    assert_same(run(other, resumed, 4, 6), run(model, optimizer, 4, 6))


def test_memory_report_counts_them():
    def report(**options: object) -> torchium.optimizers.MemoryReport:
        return torchium.Shampoo(mlp().parameters(), **options).memory_report()

    whole, rounded = report().total.state, report(**BFLOAT16).total.state
    assert rounded.roots * 2 == whole.roots > 0
    assert rounded.statistics == whole.statistics


@pytest.mark.parametrize("options", CASES)
def test_both_languages_are_the_same(options):
    pytest.importorskip("torchium_cpp._C", exc_type=ImportError)
    results = []
    for language in ("python", "cpp"):
        made = []

        def make_optimizer(params, language=language, made=made):
            kept = {"root_dtype": "bfloat16"}
            made.append(
                (make(language, "Shampoo", params, block_size=8, **options, **kept), params)
            )
            return made[0][0]

        history = train("odd_shapes", torch.float32, make_optimizer)
        results.append((history, [state_of(made[0][0], p) for p in made[0][1]]))
    assert_same(*results)
    (state,) = [s for s in results[1][1] if "roots.0" in s][:1]
    assert state["roots.0"].dtype == torch.bfloat16
