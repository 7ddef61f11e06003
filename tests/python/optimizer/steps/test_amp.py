"""Mixed precision: GradScaler, autocast and low-precision parameters."""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import (
    ALL_CASES,
    all_cases,
    assert_same,
    capturing_cases,
    give_gradients,
    ignore_fallback,
    mlp,
    plain_cases,
    run,
    snapshot,
    state_in_own_dtype,
    values,
)
from torch import nn
from torch.amp import GradScaler

pytestmark = ignore_fallback


def inputs_of(step: int, device: torch.device) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(device)


def train(make, device, *, scaler=None, unscale=False, clip=None, steps=6):
    model = mlp(device)
    optimizer = make(model.parameters())
    if hasattr(optimizer, "grad_scaler"):
        optimizer.grad_scaler = scaler
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(inputs_of(step, device)).square().sum()
        if scaler is None:
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return values(model), optimizer


@all_cases
@pytest.mark.parametrize(("unscale", "clip"), [(False, None), (True, None), (True, 0.1)])
def test_scaled_training_is_training(make, unscale, clip, device):
    """A power of two scales and unscales without rounding."""
    scaler = GradScaler(device.type, init_scale=1024.0)
    scaled, _ = train(make, device, scaler=scaler, unscale=unscale, clip=clip)
    plain, _ = train(make, device, clip=clip)
    assert scaler.get_scale() == 1024.0
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-7)


@all_cases
def test_overflowing_scale_skips_the_step_and_training_goes_on(make, device):
    scaler = GradScaler(device.type, init_scale=2.0**127, growth_interval=1000)
    model = mlp(device)
    optimizer = make(model.parameters())
    if hasattr(optimizer, "grad_scaler"):
        optimizer.grad_scaler = scaler
    before = values(model)
    skipped = 0
    for step in range(80):
        optimizer.zero_grad()
        scaler.scale(model(inputs_of(step, device)).square().sum() * 1e4).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            assert_same(values(model), before)
            assert all(not state["step"] for state in optimizer.state.values())
        else:
            break
    assert skipped > 3  # the optimizer itself would have raised
    assert not torch.equal(values(model)[0], before[0])
    assert optimizer.state[model[0].weight]["step"].item() == 1


@all_cases
def test_disabled_scaler_is_no_scaler(make):
    device = torch.device("cpu")
    with_scaler, _ = train(make, device, scaler=GradScaler("cpu", enabled=False))
    without, _ = train(make, device)
    assert_same(with_scaler, without)


@all_cases
def test_autocast_training_lowers_the_loss(make, device):
    model = mlp(device)
    optimizer = make(model.parameters())
    inputs = inputs_of(0, device)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(inputs), torch.sin(inputs[:, :3]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    for p in model.parameters():
        assert p.dtype == torch.float32
        assert all(t.dtype != torch.bfloat16 for _, t in state_in_own_dtype(optimizer, p))


@all_cases
def test_step_inside_autocast_is_the_same_step(make):
    """The loop's autocast must not lower the precision of the step."""
    inside, outside = mlp(), mlp()
    expected = run(outside, make(outside.parameters()))
    optimizer = make(inside.parameters())
    for step in range(4):
        give_gradients(inside, optimizer, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    assert_same(values(inside), expected)


@plain_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_get_the_rounded_float32_step(make, dtype):
    low, full = mlp(dtype=dtype), mlp()
    full.load_state_dict(low.state_dict())
    for p, q in zip(low.parameters(), full.parameters(), strict=True):
        p.grad = torch.full_like(p, 0.5)
        q.grad = torch.full_like(q, 0.5)
    make(low.parameters()).step()
    make(full.parameters()).step()
    for p, q in zip(values(low), values(full), strict=True):
        torch.testing.assert_close(p, q.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)


# ---- optimizers that see scaled output gradients


@capturing_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_model_takes_the_step_of_the_float32_one(make, dtype):
    low, full = mlp(dtype=dtype), mlp()
    full.load_state_dict(low.state_dict())
    start = values(full)
    moved = []
    for model in (low, full):
        inputs = inputs_of(0, torch.device("cpu")).to(next(model.parameters()).dtype)
        optimizer = make(model.parameters())
        model(inputs).square().mean().backward()
        optimizer.step()
        moved.append(
            torch.cat([(p - q).flatten() for p, q in zip(values(model), start, strict=True)])
        )
    assert (moved[0] - moved[1]).norm() < 0.1 * moved[1].norm()


@pytest.mark.cuda
@pytest.mark.parametrize("name", [n for n in ALL_CASES if n != "natural_gradient"])  # waits
def test_a_scaler_needs_no_wait(name):
    make = ALL_CASES[name]
    scaler = GradScaler("cuda", init_scale=1024.0)
    model = mlp("cuda")
    optimizer = make(model.parameters())
    if hasattr(optimizer, "grad_scaler"):
        optimizer.grad_scaler = scaler
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(inputs_of(step, torch.device("cuda"))).square().mean()).backward()
        torch.cuda.synchronize()
        try:
            if step == 5:  # state exists, nothing is due
                torch.cuda.set_sync_debug_mode("error")
            scaler.step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.update()
    optimizer.check_errors()


@plain_cases
def test_gradients_in_float16_are_refused_by_name(make):
    model = mlp().half()
    optimizer = make(model.parameters())
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(inputs_of(0, torch.device("cpu")).half()).square().mean()).backward()
    before = values(model), [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="float16 would underflow"):
        scaler.step(optimizer)
    assert_same((values(model), [p.grad for p in model.parameters()]), before)


@plain_cases
def test_a_step_that_raises_leaves_nothing_of_the_scaler(make, device):
    """A scaler removes its attributes only after a step that returns."""
    model = mlp(device)
    optimizer = make(model.parameters())
    scaler = GradScaler(device.type, init_scale=1024.0)
    run(model, optimizer, 0, 1)
    good = optimizer.param_groups[0]["eps"]
    for index in range(2):
        optimizer.zero_grad()
        scaler.scale(model(inputs_of(index, device)).square().mean()).backward()
        scaled = [p.grad.clone() for p in model.parameters()]
        optimizer.param_groups[0]["eps"] = good if index else -1.0
        if index == 0:
            with pytest.raises(ValueError, match="eps"):
                scaler.step(optimizer)
            assert_same([p.grad for p in model.parameters()], scaled)
        else:
            scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        scaler.update()
    unscaled = [g / 1024.0 for g in scaled]
    assert_same([p.grad for p in model.parameters()], unscaled)


@plain_cases
def test_an_optimizer_without_gradients_steps_under_a_scaler(make, device):
    """As for one of a GAN's two optimizers in every second step."""
    models = mlp(device), mlp(device)
    idle, busy = (make(model.parameters()) for model in models)
    scaler = GradScaler(device.type, init_scale=1024.0)
    scaler.scale(models[1](inputs_of(0, device)).square().mean()).backward()
    scaler.step(busy)
    busy.zero_grad()
    scaler.scale(models[1](inputs_of(0, device)).square().mean()).backward()
    idle.grad_scale, idle.found_inf = scaler._get_scale_async(), 0
    idle.step()
    assert not idle.state


@capturing_cases
def test_the_optimizer_need_not_know_the_scaler(make, device):
    results = []
    for known in (True, False):
        model = mlp(device)
        optimizer = make(model.parameters())
        scaler = GradScaler(device.type, init_scale=1024.0)
        if known:
            optimizer.grad_scaler = scaler
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(model(inputs_of(step, device)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(values(model))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@capturing_cases
def test_gradients_unscaled_by_an_unknown_scaler_are_refused(make):
    model = mlp()
    optimizer = make(model.parameters())
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(inputs_of(0, torch.device("cpu"))).square().mean()).backward()
    scaler.unscale_(optimizer)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"pass grad_scaler=scaler"):
        scaler.step(optimizer)
    assert_same(snapshot(optimizer), before)


@capturing_cases
def test_a_copy_has_no_scaler(make):
    """A copy of the scaler would keep its scale forever."""
    import copy

    scaler = GradScaler("cpu")
    model = mlp()
    optimizer = make(model, grad_scaler=scaler)
    assert optimizer.grad_scaler is scaler
    assert copy.deepcopy((model, optimizer))[1].grad_scaler is None


@capturing_cases
@pytest.mark.parametrize("scaler", [1024.0, "scaler", torch.ones(())], ids=str)
def test_what_is_no_scaler_is_refused(make, scaler):
    with pytest.raises(ValueError, match="grad_scaler must be"):
        make(mlp(), grad_scaler=scaler)


@capturing_cases
def test_a_step_that_the_scaler_skips_forgets_its_captures(make):
    """The state afterwards has no trace of it either."""
    device = torch.device("cpu")
    results = []
    for overflow in (False, True):
        scaler = GradScaler("cpu", init_scale=1024.0, backoff_factor=1.0 - 2.0**-20)
        model = mlp()
        optimizer = make(model, grad_scaler=scaler)
        for step in range(5):
            if overflow and step == 3:
                optimizer.zero_grad()
                scaler.scale(model(inputs_of(9, device)).square().mean() * 1e38).backward()
                scaler.step(optimizer)
                scaler.update()
                scaler.update(1024.0)
            model.zero_grad()
            scaler.scale(model(inputs_of(step, device)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((values(model), optimizer.state_dict()))
    assert_same(results[1], results[0])
