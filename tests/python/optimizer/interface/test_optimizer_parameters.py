"""Every optimizer supports parameters of any dtype, order, layout and size."""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import (
    COUNTS,
    all_cases,
    assert_same,
    give_gradients,
    ignore_fallback,
    mlp,
    plain_cases,
    plain_or_kfac_cases,
    run,
    set_gradients,
    state_in_own_dtype,
    values,
)
from torch import nn

pytestmark = ignore_fallback


@all_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_float32_state(make, dtype, device):
    model = mlp(device, dtype)
    optimizer = make(model.parameters())
    before = values(model)
    run(model, optimizer, steps=5)
    optimizer.check_errors()
    for p, b in zip(model.parameters(), before, strict=True):
        assert p.dtype == dtype
        assert torch.isfinite(p).all()
        assert not torch.equal(p, b)
        for key, tensor in state_in_own_dtype(optimizer, p):
            counts = {"step": torch.float64, "root_failures": torch.int32}
            of_count = torch.float64 if key.endswith("_start") else torch.float32
            assert tensor.dtype == counts.get(key.split(".")[0], of_count), key


@all_cases
def test_float64_parameters_have_float64_state(make):
    model = mlp(dtype=torch.float64)
    optimizer = make(model.parameters())
    run(model, optimizer)
    for p in model.parameters():
        for key, tensor in state_in_own_dtype(optimizer, p):
            if key not in COUNTS and not key.startswith("root_failures"):
                assert tensor.dtype == torch.float64, key


@plain_cases
def test_parameters_of_several_dtypes_share_a_group(make):
    together, apart = mlp(), mlp()
    for model in (together, apart):
        model[0].to(torch.float64)
        model[3].to(torch.bfloat16)
    optimizer = make(together.parameters())
    by_dtype = [make(m.parameters()) for m in apart if any(True for _ in m.parameters())]
    for step in range(4):
        for model in (together, apart):
            set_gradients(model.parameters(), step)
        optimizer.step()
        for other in by_dtype:
            other.step()
    torch.testing.assert_close(values(together), values(apart))


@plain_cases
def test_the_memory_format_of_a_parameter_does_not_matter(make):
    plain, strided = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    strided.load_state_dict(plain.state_dict())
    strided = strided.to(memory_format=torch.channels_last)
    optimizers = [make(plain.parameters()), make(strided.parameters())]
    for step in range(4):
        for model, optimizer in zip((plain, strided), optimizers, strict=True):
            set_gradients(model.parameters(), step)
            optimizer.step()
        strided.weight.grad = strided.weight.grad.contiguous(memory_format=torch.channels_last)
    assert strided.weight.is_contiguous(memory_format=torch.channels_last)
    # Statistics of two gradients are singular, and their roots amplify the rounding of another order of sums.
    torch.testing.assert_close(values(strided), values(plain), rtol=1e-4, atol=2e-5)


@plain_or_kfac_cases
@pytest.mark.parametrize(
    "shape",
    [(), (1,), (7,), (1, 7), (7, 1), (1, 1), (3, 4, 5), (2, 3, 2, 3), (2, 1, 3, 2, 2), (9, 5)],
)
def test_parameters_of_any_order_move_and_stay_finite(make, shape, device):
    p = nn.Parameter(torch.ones(shape, device=device))
    optimizer = make([p])
    for step in range(5):
        set_gradients([p], step)
        before = p.detach().clone()
        optimizer.step()
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before)
    optimizer.check_errors()


@plain_or_kfac_cases
def test_empty_parameters_are_harmless(make):
    model, alone = mlp(), mlp()
    empty = nn.Parameter(torch.empty(0, 3))
    optimizer, other = make([empty, *model.parameters()]), make(alone.parameters())
    for step in range(3):
        give_gradients(model, optimizer, step)
        empty.grad = torch.zeros_like(empty)
        optimizer.step()
        run(alone, other, step, 1)
    assert_same(values(model), values(alone))
    make([empty]).load_state_dict(make([empty]).state_dict())
