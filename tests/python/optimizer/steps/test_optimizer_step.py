"""The guarantees of every optimizer's step, as a torch.optim.Optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
import torchium
from optimizer_cases import (
    ALL_CASES,
    all_cases,
    assert_same,
    backward,
    give_gradients,
    ignore_fallback,
    mlp,
    plain_cases,
    plain_or_kfac_cases,
    run,
    set_gradients,
    trained,
    values,
)
from torch import nn

pytestmark = ignore_fallback
# The compiler sees classes and captures, not options.
COMPILED = (
    "shampoo_all_buffers",
    "adagrad",
    "kfac",
    "kfac_inverse_free",
    "natural_gradient_between",
)
compiled_cases = pytest.mark.parametrize("make", [ALL_CASES[n] for n in COMPILED], ids=COMPILED)


@all_cases
def test_training_lowers_the_loss(make, device):
    torch.manual_seed(0)
    model = mlp(device)
    optimizer = make(model.parameters())
    inputs = torch.randn(64, 6).to(device)
    targets = torch.sin(inputs[:, :3])

    def loss():
        return nn.functional.mse_loss(model(inputs), targets)

    first = loss().item()
    for _ in range(60):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.5 * first


@all_cases
def test_closure_runs_once_with_gradients_and_its_loss_is_returned(make):
    model = mlp()
    optimizer = make(model.parameters())
    calls = []

    def closure():
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = model(torch.ones(4, 6)).square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    before = values(model)
    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
        assert not torch.is_grad_enabled()
    assert len(calls) == 1
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    assert optimizer.step() is None


@all_cases
def test_step_gives_no_parameter_and_no_state_a_graph(make):
    model, optimizer = trained(make)
    for p in model.parameters():
        assert p.is_leaf
        assert p.requires_grad
        assert all(not t.requires_grad and t.grad_fn is None for t in optimizer.state[p].values())


@all_cases
def test_step_bumps_the_version_of_the_parameters(make):
    model = mlp()
    optimizer = make(model.parameters())
    run(model, optimizer, steps=1)
    versions = [p._version for p in model.parameters()]
    run(model, optimizer, steps=1)
    assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))


@all_cases
def test_step_leaves_the_gradients_alone(make):
    model = mlp()
    optimizer = make(model.parameters())
    for step in range(3):
        give_gradients(model, optimizer, step)
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert_same([p.grad for p in model.parameters()], before)


@all_cases
def test_parameters_without_a_gradient_keep_value_and_state(make):
    model = mlp()
    optimizer = make(model.parameters())
    frozen, late, *others = model.parameters()
    frozen.requires_grad_(False)
    start = [frozen.clone(), late.detach().clone()]

    def step_of(active, step):
        give_gradients(model, optimizer, step)
        for p in model.parameters():
            if all(p is not a for a in active):
                p.grad = None
        optimizer.step()

    for step in range(3):
        step_of(others, step)
    assert_same([frozen, late.detach()], start)
    assert not optimizer.state.get(frozen)
    assert not optimizer.state.get(late)

    step_of([late, *others], 3)
    assert optimizer.state[late]["step"].item() == 1
    assert optimizer.state[others[0]]["step"].item() == 4

    kept = copy.deepcopy(dict(optimizer.state[late]))
    step_of(others, 4)
    assert_same(dict(optimizer.state[late]), kept)
    assert_same(frozen, start[0])


@plain_cases
def test_a_late_parameter_moves_as_one_that_starts_alone(make):
    """Each parameter has its own step count, root schedule and bias correction."""
    model, lonely = mlp(), mlp()
    optimizer = make(model.parameters())
    late, alone = model[3].weight, lonely[3].weight
    alone_optimizer = make([alone])
    others = [p for p in model.parameters() if p is not late]
    for step in range(3):
        set_gradients(others, step)
        optimizer.step()
    for step in range(3, 10):
        set_gradients([*others, late], step)
        alone.grad = late.grad.clone()
        optimizer.step()
        alone_optimizer.step()
    torch.testing.assert_close(late, alone, rtol=1e-6, atol=1e-7)


@all_cases
def test_step_without_any_gradient_does_nothing(make):
    model = mlp()
    optimizer = make(model.parameters())
    before = values(model)
    optimizer.step()
    assert_same(values(model), before)
    assert not any(optimizer.state.values())


@all_cases
def test_zero_grad_sets_to_none_or_to_zero(make):
    model, optimizer = trained(make)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@all_cases
def test_maximize_is_the_step_of_the_negated_gradient(make):
    up, down = mlp(), mlp()
    up_optimizer = make(up.parameters(), maximize=True)
    down_optimizer = make(down.parameters())
    for group in (*up_optimizer.param_groups, *down_optimizer.param_groups):
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    for step in range(4):
        backward(up, step)
        backward(down, step, sign=-1.0)
        up_optimizer.step()
        down_optimizer.step()
    assert_same(values(up), values(down))


@all_cases
def test_step_hooks_run_around_the_step(make):
    model = mlp()
    optimizer = make(model.parameters())
    calls = []
    before = values(model)

    def pre(opt, args, kwargs):
        assert opt is optimizer
        calls.append("pre")
        assert_same(values(model), before)

    def post(opt, args, kwargs):
        calls.append("post")
        assert not torch.equal(values(model)[0], before[0])

    handles = [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]
    run(model, optimizer, steps=1)
    assert calls == ["pre", "post"]
    for handle in handles:
        handle.remove()
    run(model, optimizer, steps=1)
    assert len(calls) == 2


@compiled_cases
def test_a_compiled_model_trains_as_the_model_itself(make):
    torch._dynamo.reset()
    plain, compiled = mlp(), mlp()
    optimizers = [make(plain.parameters()), make(compiled.parameters())]
    forward = torch.compile(compiled, backend="eager")
    inputs = torch.linspace(-1, 1, 24).reshape(4, 6)
    for _ in range(3):
        for optimizer, module in zip(optimizers, (plain, forward), strict=True):
            optimizer.zero_grad()
            module(inputs).square().sum().backward()
            optimizer.step()
    assert_same(values(compiled), values(plain))


@compiled_cases
def test_a_compiled_training_step_is_the_step(make):
    torch._dynamo.reset()
    plain, compiled = mlp(), mlp()
    inputs = torch.linspace(-1, 1, 24).reshape(4, 6)

    def train(model, optimizer):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()

    optimizer, other = make(plain.parameters()), make(compiled.parameters())
    compiled_train = torch.compile(train, backend="eager")
    for step in range(4):
        optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.01 / (1 + step)
        train(plain, optimizer)
        compiled_train(compiled, other)
    assert_same(values(compiled), values(plain))


@plain_or_kfac_cases
def test_a_thousand_parameters_cost_little_more_than_adam(make):
    """The benchmark's bound is 3; this one only catches a quadratic or per-tensor regression."""
    import timeit

    params = [nn.Parameter(torch.zeros(3)) for _ in range(1000)]
    set_gradients(params, 0)

    def seconds(optimizer):
        optimizer.step()
        return min(timeit.repeat(optimizer.step, number=2, repeat=5))

    adam = seconds(torch.optim.Adam(params, foreach=True))
    assert seconds(make(params)) < 10 * adam


@all_cases
def test_the_default_device_does_not_matter(make):
    """All tensors that the optimizer creates are where its parameters are, or on the CPU."""
    plain, elsewhere = mlp(), mlp()
    optimizer, other = make(plain.parameters()), make(elsewhere.parameters())
    inputs = [torch.linspace(-1, 1, 24).reshape(4, 6) + step for step in range(5)]

    def train(model, optimizer):
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().sum(1).mean().backward()
            optimizer.step()
        optimizer.check_errors()
        state_dict = optimizer.state_dict()
        optimizer.load_state_dict(state_dict)
        return state_dict

    expected = train(plain, optimizer)
    torch.set_default_device("meta")
    try:
        found = train(elsewhere, other)
    finally:
        torch.set_default_device(None)
    assert_same(values(elsewhere), values(plain))
    assert_same(found, expected)
    assert not torch.equal(values(plain)[0], values(mlp())[0])


@pytest.mark.parametrize(
    ("make", "phases"),
    [
        (torchium.Shampoo, {"elementwise", "statistics", "roots", "precondition"}),
        (torchium.Adagrad, {"elementwise"}),
        (torchium.KFAC, {"elementwise", "factors", "inverses", "precondition"}),
        (torchium.NaturalGradient, {"elementwise", "gram", "precondition"}),
    ],
)
def test_a_profiler_sees_the_phases_of_a_step(make, phases):
    """Which `torch.autograd.profiler.emit_nvtx` shows as NVTX ranges too."""
    model = mlp()
    optimizer = make(model.parameters(), lr=0.01)
    with torch.profiler.profile() as profile:
        run(model, optimizer, steps=1)
    names = {event.key for event in profile.key_averages()}
    assert {f"torchium::{phase}" for phase in phases} <= names
