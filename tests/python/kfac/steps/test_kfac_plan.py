"""Steps of K-FAC's plan against the float64 reference and hand-built solves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchium
from combinations import in_turn
from kfac_plan import PlanKFAC, Problem
from optimizer_cases import assert_same
from reference import Layer, ReferenceKFAC
from reference.kfac import Sample
from torch import Tensor, nn

SPLITS = ["pi", "plain", "exact"]
OPTIONS: dict[str, tuple[dict, dict]] = {  # of groups, of the whole optimizer
    "defaults": ({}, {}),
    "every_step": ({"lr": 0.1, "TCov": 1, "TInv": 1}, {"kl_clip": None}),
    "schedules": ({"lr": 0.1, "TCov": 2, "TInv": 3, "stat_decay": 0.6}, {"kl_clip": 0.1}),
    "no_momentum": ({"lr": 0.1, "TCov": 1, "TInv": 2, "momentum": 0.0}, {}),
    "weight_decay": ({"lr": 0.1, "TCov": 1, "TInv": 2, "weight_decay": 0.1}, {"kl_clip": 1.0}),
    "maximize": ({"lr": 0.1, "TCov": 1, "TInv": 2, "maximize": True, "weight_decay": 0.1}, {}),
    "damping_0": ({"lr": 0.1, "damping": 0.0, "eps": 1e-2, "TCov": 1, "TInv": 1}, {}),
}


def one_group(problem: Problem, **options: Any) -> list[dict]:
    return [{"params": problem.params, **options}]


def run_both(
    make_groups: Any, dtype: torch.dtype, device: Any, samples: int, shared: dict
) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after a few steps of the operator and of the reference."""
    ours, theirs = Problem(dtype, device), Problem()
    optimizer = PlanKFAC(make_groups(ours), ours.layers, **shared)
    reference = ReferenceKFAC(make_groups(theirs), theirs.layers, **shared)
    for _ in range(7):
        optimizer.step(ours.batch(samples))
        reference.step(theirs.batch(samples))
    return ours.params, theirs.params


@pytest.mark.parametrize(
    ("name", "split", "dtype"), in_turn(OPTIONS, SPLITS, [torch.float64, torch.float32])
)
def test_steps_follow_the_reference(name, split, dtype, device):
    """With 2 samples the factors are singular: float32 cannot resolve their zero eigenvalues."""
    samples = 2 if dtype == torch.float64 else 12
    options, shared = OPTIONS[name]
    ours, theirs = run_both(
        lambda problem: one_group(problem, **options),
        dtype,
        device,
        samples,
        {**shared, "damping_split": split},
    )
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.cpu().double(), q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("split", SPLITS)
def test_parameters_have_their_own_options(split, device):
    """Weight and bias of one layer in different groups; the weight's schedule and damping apply."""

    def groups(problem: Problem) -> list[dict]:
        biases = [layer.bias for layer in problem.layers if layer.bias is not None]
        weights = [layer.weight for layer in problem.layers]
        return [
            {"params": biases, "lr": 0.3, "momentum": 0.0, "damping": 7.0, "TCov": 1},
            {"params": weights[:2], "lr": 0.1, "damping": 0.1, "eps": 1e-3, "TCov": 1, "TInv": 2},
            {"params": weights[2:], "lr": 0.2, "momentum": 0.5, "maximize": True, "TCov": 2},
            {"params": problem.others, "lr": 0.05, "weight_decay": 0.1},
        ]

    ours, theirs = run_both(groups, torch.float64, device, 3, {"damping_split": split})
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-9, atol=1e-9)


def single_layer(
    weight: Tensor, bias: Tensor | None = None, groups: int = 1, **options: Any
) -> tuple[list[Tensor], Layer, PlanKFAC]:
    """One layer with an optimizer whose update is the direction itself."""
    params = [p for p in (weight, bias) if p is not None]
    layer = Layer(weight, bias, groups)
    of_group = {"lr": 1.0, "momentum": 0.0, "TCov": 1, "TInv": 1}
    of_group |= {k: v for k, v in options.items() if k in ("damping", "eps", "lr")}
    rest = {"kl_clip": None} | {k: v for k, v in options.items() if k not in of_group}
    return params, layer, PlanKFAC([{"params": params, **of_group}], [layer], **rest)


def update_of(params: list[Tensor], optimizer: PlanKFAC, captured: dict) -> list[Tensor]:
    before = [p.clone() for p in params]
    optimizer.step(captured)
    return [old - new for old, new in zip(before, params, strict=True)]


@pytest.mark.parametrize("damping", [1e-4, 1e-2, 1.0])
def test_one_sample_exact_is_the_dense_damped_empirical_fisher(damping, device):
    """Without weight sharing A (x) G of one sample is g g^T of its gradient."""
    torch.manual_seed(1)
    weight = torch.randn(5, 4, dtype=torch.float64, device=device)
    bias = torch.randn(5, dtype=torch.float64, device=device)
    options = {"damping": damping, "eps": 1e-14, "damping_split": "exact"}
    params, layer, optimizer = single_layer(weight, bias, **options)
    a, g = torch.randn(1, 1, 5, dtype=torch.float64), torch.randn(1, 1, 5, dtype=torch.float64)
    a[..., -1] = 1.0
    for p in params:
        p.grad = torch.randn_like(p)
    j = torch.outer(g[0, 0], a[0, 0]).flatten()  # rows of [weight, bias]
    V = layer.join(weight.grad, bias.grad).flatten().cpu()
    expected = torch.linalg.solve(torch.outer(j, j) + damping * torch.eye(25, dtype=V.dtype), V)
    d = update_of(params, optimizer, {0: [Sample(a, g)]})
    actual = layer.join(*d).flatten().cpu()
    assert (actual - expected).norm() < 1e-8 * expected.norm()


@pytest.mark.parametrize("split", ["pi", "plain"])
def test_split_damping_equals_a_solve_by_hand(split):
    a = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    g = torch.tensor([[2.0, 0.0, 1.0], [-1.0, 1.0, 0.5]], dtype=torch.float64)
    params, _, optimizer = single_layer(
        torch.zeros(3, 2, dtype=torch.float64), damping=0.09, eps=0.0, damping_split=split
    )
    params[0].grad = torch.arange(6, dtype=torch.float64).view(3, 2)
    A, G = a.T @ a / 2, g.T @ g / 2
    pi = (A.trace() / 2 / (G.trace() / 3)).sqrt() if split == "pi" else 1.0
    expected = (
        torch.linalg.inv(G + 0.3 / pi * torch.eye(3, dtype=G.dtype))
        @ params[0].grad
        @ torch.linalg.inv(A + 0.3 * pi * torch.eye(2, dtype=A.dtype))
    )
    samples = [Sample(x.view(1, 1, -1), y.view(1, 1, -1)) for x, y in zip(a, g, strict=True)]
    (actual,) = update_of(params, optimizer, {0: samples})
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", SPLITS)
def test_kl_clip_bounds_the_step(split):
    """After a clipped step, |sum v.g lr^2| is kl_clip; others are not scaled."""
    clipped, free = Problem(), Problem()
    optimizers = [
        PlanKFAC(
            one_group(problem, lr=lr, momentum=0.0), problem.layers, kl_clip=k, damping_split=split
        )
        for problem, lr, k in [(clipped, 0.1, 1e-4), (free, 0.1, None)]
    ]
    start = [p.clone() for p in clipped.params]
    for problem, optimizer in zip((clipped, free), optimizers, strict=True):
        optimizer.step(problem.batch())
    preconditioned = len(start) - len(clipped.others)
    steps = [p - q for p, q in zip(start, clipped.params, strict=True)]
    unscaled = [p - q for p, q in zip(start, free.params, strict=True)]
    kl = sum(
        (0.1 * step * p.grad).sum()
        for step, p in zip(unscaled[:preconditioned], free.params, strict=False)
    )
    scale = (1e-4 / kl).sqrt()
    assert scale < 0.5
    for i, (step, full) in enumerate(zip(steps, unscaled, strict=True)):
        expected = scale * full if i < preconditioned else full
        torch.testing.assert_close(step, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("split", SPLITS)
def test_a_layer_that_never_ran_takes_its_gradient(split):
    problem = Problem()
    optimizer = PlanKFAC(
        one_group(problem, lr=1.0, momentum=0.0), problem.layers, damping_split=split, kl_clip=None
    )
    before = [p.clone() for p in problem.params]
    problem.batch()
    optimizer.step({})
    for old, p in zip(before, problem.params, strict=True):
        torch.testing.assert_close(old - p, p.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("zero", ["a", "g", "both"])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_zero_factors_stay_finite(split, zero, eps, device):
    weight = torch.ones(3, 4, device=device)
    params, _, optimizer = single_layer(weight, damping=1e-3, eps=eps, damping_split=split)
    params[0].grad = torch.full_like(weight, 0.1)
    a, g = torch.ones(1, 2, 4), torch.ones(1, 2, 3)
    captured = {0: [Sample(a * (zero == "g"), g * (zero == "a"))]}
    (step,) = update_of(params, optimizer, captured)
    assert step.isfinite().all()
    assert (step * params[0].grad).sum() > 0
    assert optimizer.states[0]["root_failures"].tolist() == [0, 0]


def test_a_mean_and_a_sum_give_the_same_factors(device):
    mean, total = Problem(device=device), Problem(device=device)
    first = PlanKFAC(one_group(mean, lr=0.1), mean.layers)
    second = PlanKFAC(one_group(total, lr=0.1), total.layers, batch_averaged=False)
    for _ in range(2):
        first.step(mean.batch())
        second.step(total.batch())
    torch.testing.assert_close(mean.params, total.params, rtol=1e-10, atol=1e-12)


def tensors_of(optimizer: PlanKFAC) -> list[Tensor]:
    """Everything that a step may change, except status."""
    state = [t for layer in optimizer.states for t in layer.values()]
    shared = [
        s[key] for s in optimizer.state.values() for key in ("step", "momentum_buffer") if key in s
    ]
    return [*optimizer.params, *shared, *state]


def clones(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("where", ["gradient", "a", "g"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_number_skips_the_step(split, where, bad, device):
    problem = Problem(torch.float32, device)
    optimizer = PlanKFAC(
        one_group(problem, lr=0.1, TCov=1, TInv=1), problem.layers, damping_split=split
    )
    optimizer.step(problem.batch())
    before = clones(tensors_of(optimizer))
    for skips in (1, 2):
        captured = problem.batch()
        if where == "gradient":
            problem.layers[1].weight.grad[0, 0] = bad
        else:
            captured[1][2][where == "g"][0, 0, 0] = bad
        optimizer.step(captured)
        assert_same(clones(tensors_of(optimizer)), before)
        index = optimizer.position(problem.layers[1].weight)
        assert optimizer.failures == [skips, index, 0, -1]
    optimizer.step(problem.batch())
    assert optimizer.failures == [0, -1, 0, -1]
    assert all(t.isfinite().all() for t in tensors_of(optimizer))


@pytest.mark.parametrize("finite", [True, False])
def test_found_inf_skips_the_step_without_blame(finite, device):
    problem = Problem(torch.float32, device)
    optimizer = PlanKFAC(one_group(problem, lr=0.1), problem.layers)
    optimizer.step(problem.batch())
    before = clones(tensors_of(optimizer))
    for _ in range(4):
        captured = problem.batch()
        if not finite:
            problem.others[0].grad.fill_(float("inf"))
        optimizer.step(captured, found_inf=True)
        assert_same(clones(tensors_of(optimizer)), before)
        assert optimizer.failures == [0, -1, 0, -1]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("factor", ["A", "G"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_failed_root_keeps_the_last_good_pair(dtype, split, factor, device):
    problem = Problem(dtype, device)
    optimizer = PlanKFAC(
        one_group(problem, lr=0.1, TCov=1, TInv=1, stat_decay=0.5),
        problem.layers,
        damping_split=split,
    )
    optimizer.step(problem.batch())
    layer = 2  # the grouped convolution: its second group fails
    state = optimizer.states[layer]
    good = state[factor][1].clone()
    roots = ["A_roots", "G_roots"] + ["A_eigenvalues", "G_eigenvalues"] * (split == "exact")
    before = {key: state[key].clone() for key in roots}
    index = optimizer.position(problem.layers[layer].weight)
    for failures in (1, 2, 3):
        state[factor][1].fill_(float("nan"))
        optimizer.step(problem.batch())
        counts = [failures, 0] if factor == "A" else [0, failures]
        assert state["root_failures"].tolist() == counts
        assert optimizer.failures == [0, -1, failures, index]
        for key in roots:
            torch.testing.assert_close(state[key][1], before[key][1], rtol=0, atol=0)
            assert not torch.equal(state[key][0], before[key][0])
    assert all(p.isfinite().all() for p in optimizer.params)
    state[factor][1].copy_(good)
    optimizer.step(problem.batch())
    assert state["root_failures"].tolist() == [0, 0]
    assert optimizer.failures == [0, -1, 0, -1]
    assert not torch.equal(state["A_roots"][1], before["A_roots"][1])


@pytest.mark.parametrize("split", ["pi", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_inaccurate_inverse_is_not_taken(dtype, split, device):
    """For factors with negative eigenvalues the iteration can give finite but wrong results."""
    problem = Problem(dtype, device)
    optimizer = PlanKFAC(
        one_group(problem, lr=0.1, TCov=100, TInv=1), problem.layers, damping_split=split
    )
    optimizer.shared["solver"] = "newton"
    optimizer.step(problem.batch())
    state = optimizer.states[2]  # of the grouped convolution
    before = state["A_roots"].clone()
    state["A"][1] = -10 * torch.eye(state["A"].shape[-1])
    state["A"][0] *= 2
    optimizer.step(problem.batch())
    assert state["root_failures"].tolist() == [1, 0]
    assert torch.equal(state["A_roots"][1], before[1])
    assert not torch.equal(state["A_roots"][0], before[0])


@pytest.mark.parametrize("split", SPLITS)
def test_a_first_root_that_fails_leaves_the_gradient(split):
    params, _, optimizer = single_layer(
        torch.zeros(3, 4), damping=0.0, eps=0.0, damping_split=split
    )
    params[0].grad = torch.ones(3, 4)
    zero = {0: [Sample(torch.zeros(1, 1, 4), torch.zeros(1, 1, 3))]}
    if split == "exact":  # its damping is added later: a factor fails
        optimizer.states[0]["A"].fill_(float("nan"))
    (step,) = update_of(params, optimizer, zero)
    assert_same(step, params[0].grad)
    assert optimizer.states[0]["root_failures"].max() == 1


@pytest.mark.parametrize("split", SPLITS)
def test_any_memory_layout_gives_the_same_step(split):
    def permuted(layer: Layer) -> Layer:
        weight = layer.weight
        if weight.dim() == 4:
            weight = weight.to(memory_format=torch.channels_last)
        else:
            weight = weight.T.contiguous().T
        return Layer(weight, layer.bias, layer.groups)

    plain, other = Problem(), Problem()
    other.layers = [permuted(layer) for layer in other.layers]
    results = []
    for problem in (plain, other):
        optimizer = PlanKFAC(
            one_group(problem, lr=0.1, TCov=1, TInv=2, weight_decay=0.1),
            problem.layers,
            damping_split=split,
        )
        for _ in range(3):
            captured = problem.batch()
            for layer in problem.layers:
                layer.weight.grad = layer.weight.grad.clone()  # in the layout of the weight
            optimizer.step(captured)
        results.append([p.contiguous() for p in problem.params])
    strides = [layer.weight.stride() for layer in plain.layers]
    assert strides != [layer.weight.stride() for layer in other.layers]
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_parameters_have_float32_state(split, dtype, device):
    half, full = Problem(dtype, device), Problem(torch.float32, device)
    for p, q in zip(full.params, half.params, strict=True):
        p.copy_(q)
    optimizers = [
        PlanKFAC(one_group(problem, lr=0.1), problem.layers, damping_split=split)
        for problem in (half, full)
    ]
    captured = half.batch()
    full.batch()
    for p, q in zip(full.params, half.params, strict=True):
        p.grad.copy_(q.grad)
    for optimizer in optimizers:
        optimizer.step(captured)
    for state in optimizers[0].states:
        floating = [t for t in state.values() if t.is_floating_point()]
        assert {t.dtype for t in floating} == {torch.float32}
    for p, q in zip(half.params, full.params, strict=True):
        torch.testing.assert_close(p, q.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_into_a_step(dtype, device):
    results = []
    for enabled in (False, True):
        problem = Problem(torch.float32, device)
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            optimizer = PlanKFAC(one_group(problem, lr=0.1), problem.layers)
            optimizer.step(problem.batch())
        results.append(clones(tensors_of(optimizer)))
    assert_same(results[1], results[0])


def test_initial_state():
    """A skipped step creates it and changes nothing."""
    model = nn.Conv2d(6, 4, 2, groups=2).bfloat16()
    optimizer = torchium.KFAC(model, damping_split="exact")
    model(torch.randn(3, 6, 5, 5).bfloat16()).square().mean().backward()
    model.weight.grad.fill_(torch.nan)
    optimizer.step()
    state = optimizer.state[model.weight]
    assert (state["A"].shape, state["G"].shape) == ((2, 13, 13), (2, 2, 2))
    assert state["A"].dtype == torch.float32
    assert state["A"].count_nonzero() == state["G"].count_nonzero() == 0
    assert_same(state["A_eigenvectors"], torch.eye(13).repeat(2, 1, 1))
    assert_same(state["G_eigenvectors"], torch.eye(2).repeat(2, 1, 1))
    assert_same(state["A_eigenvalues"], torch.full((2, 13), -1.0))
    assert_same(state["G_eigenvalues"], torch.full((2, 2), -1.0))
    assert_same(state["factor_updates"], torch.zeros(()))
    assert_same(state["root_failures"], torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("split", SPLITS)
def test_state_that_was_replaced_must_fit(split):
    model = nn.Linear(5, 2)
    optimizer = torchium.KFAC(model, damping_split=split)
    x = torch.randn(4, 5)
    model(x).square().mean().backward()
    optimizer.step()
    key = "A_eigenvectors" if split == "exact" else "A_inverse"
    optimizer.state[model.weight][key] = torch.eye(6)[None]
    optimizer.step()
    before = model.weight.detach().clone()
    message = rf"'{key}' of parameter 'weight' .* must be Float ?\[1, 6, 6\] on cpu, got"
    optimizer.state[model.weight][key] = torch.eye(3)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("split", SPLITS)
def test_state_of_another_dtype_is_converted(split):
    model = nn.Linear(5, 2)
    optimizer = torchium.KFAC(model, damping_split=split)
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    inverse = "A_eigenvectors" if split == "exact" else "A_inverse"
    for key in (inverse, "G"):
        kept = state[key].clone()
        state[key] = kept.double()
        optimizer.step()
        assert_same(state[key], kept)
