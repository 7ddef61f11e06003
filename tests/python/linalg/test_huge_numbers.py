"""Numbers near the end of their range: the step is skipped and reported, or all stays finite."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torchium
from optimizer_cases import (
    ALL_CASES,
    CASES,
    all_cases,
    assert_same,
    computed_state,
    give_gradients,
    ignore_fallback,
    mlp,
    plain_cases,
    run,
    set_gradients,
    snapshot,
    values,
)
from torch import nn

pytestmark = ignore_fallback


def all_finite(optimizer: torch.optim.Optimizer) -> bool:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in params for t in computed_state(optimizer.state.get(p, {})).values()]
    return all(bool(t.isfinite().all()) for t in [*params, *states])


def step_or_report(optimizer: torch.optim.Optimizer, message: str) -> bool:
    """Whether a step succeeded; if it raises, the error has this message."""
    try:
        optimizer.step()
        optimizer.check_errors()
    except RuntimeError as error:
        if re.search(message, str(error)) is None:
            raise
        return False
    return True


# ---- gradients


def largest_gradient(param: torch.Tensor, step: int) -> float:
    """The documented limit of an entry (``docs/design.md``, "Numerical contract")."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    return math.sqrt(torch.finfo(dtype).max / (32 * param.numel() * step))


@all_cases
@pytest.mark.parametrize(("dtype", "huge"), [(torch.float32, 1e20), (torch.float64, 1e155)])
def test_a_gradient_too_large_to_square_skips_the_step(make, dtype, huge, device):
    model = mlp(device, dtype)
    optimizer = make(model.parameters())
    run(model, optimizer)
    optimizer.check_errors()
    before = snapshot(optimizer)
    give_gradients(model, optimizer, 4)
    model[3].weight.grad[0, 0] = huge
    optimizer.step()
    optimizer.check_errors()
    assert_same(snapshot(optimizer), before)
    run(model, optimizer, 5, 2)
    optimizer.check_errors()
    assert all_finite(optimizer)


@all_cases
def test_the_third_in_a_row_says_what_is_too_large(make, device):
    model = mlp(device)
    optimizer = make(model.named_parameters())

    def huge_steps():
        for attempt in range(3):
            give_gradients(model, optimizer, attempt)
            model[3].weight.grad[0, 0] = -1e25
            optimizer.step()
            optimizer.check_errors()

    message = (
        r"not finite or too large to square in float32 \(above 8.4e\+17\).*'3.weight' of group 0"
    )
    with pytest.raises(RuntimeError, match=message):
        huge_steps()


@plain_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [1, 5])
def test_the_limit_falls_with_elements_and_steps(make, dtype, step, device):
    param = nn.Parameter(torch.ones(40, 25, dtype=dtype, device=device))
    optimizer = make([param])
    optimizer.param_groups[0]["weight_decay"] = 0.0
    for t in range(1, step):
        set_gradients([param], t)
        optimizer.step()
    limit = largest_gradient(param, step)
    for share, taken in ((1.001, step - 1), (0.999, step)):
        param.grad = torch.full_like(param, share * limit)
        optimizer.step()
        optimizer.check_errors()
        assert optimizer.state[param]["step"] == taken
        assert all_finite(optimizer)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"grafting": "adagrad"}, {"grafting": "sgd"}], ids=str)
def test_sums_over_many_of_the_largest_gradients_are_finite(name, options, device):
    if options and name != "shampoo":
        pytest.skip("an option of Shampoo")
    params = [
        nn.Parameter(torch.ones(8, 6, device=device)),
        nn.Parameter(torch.ones(5, device=device)),
    ]
    optimizer = CASES[name](params, **options)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    for step in range(1, 200):
        for p in params:
            p.grad = torch.full_like(p, 0.999 * largest_gradient(p, step))
        optimizer.step()
    optimizer.check_errors()
    assert optimizer.state[params[0]]["step"] == 199
    assert all_finite(optimizer)


@pytest.mark.parametrize("cls", [torchium.Shampoo, torchium.Adagrad, torchium.KFAC])
def test_weight_decay_of_a_huge_parameter_skips_the_step(cls, device):
    model = mlp(device)
    with torch.no_grad():
        model[1].weight[0] = 1e22
    optimizer = cls(model.parameters(), weight_decay=0.01)
    before = values(model)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    optimizer.check_errors()
    assert_same(values(model), before)
    optimizer.param_groups[0]["weight_decay"] = 1e-10
    set_gradients(model.parameters(), 0)
    optimizer.step()
    optimizer.check_errors()
    assert optimizer.state[model[1].weight]["step"] == 1


def test_limits_hold_for_16_bits_as_for_their_float32_state(device):
    """No float16 is too large; in bfloat16 the largest number below the limit is rounded down."""
    for dtype, value, taken in (
        (torch.float16, 65504.0, 1),
        (torch.bfloat16, 1e17, 1),
        (torch.bfloat16, 1e19, 0),
    ):
        param = nn.Parameter(torch.ones(4, 4, dtype=dtype, device=device))
        optimizer = torchium.Shampoo([param], grafting="sgd")
        param.grad = torch.full_like(param, value)
        optimizer.step()
        optimizer.check_errors()
        assert optimizer.state[param]["step"] == taken
        assert all_finite(optimizer)


# ---- on the way to the parameters


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_parameters_stop_at_the_largest_number(name, dtype, device):
    most = torch.finfo(dtype).max
    params = [
        nn.Parameter(torch.full(s, 0.9 * most, dtype=dtype, device=device))
        for s in ((4, 3), (5,), (2, 3, 2, 2))
    ]
    optimizer = CASES[name](params, lr=min(0.5 * most, 1e38))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    for _ in range(4):
        for p in params:
            p.grad = -torch.ones_like(p)
        optimizer.step()
    optimizer.check_errors()
    assert all_finite(optimizer)


@pytest.mark.parametrize("grafting", [None, "sgd", "adam", "rmsprop"])
@pytest.mark.parametrize("exponent", [None, -0.5, -1.0])
def test_old_roots_of_tiny_gradients_meet_a_large_one(grafting, exponent, device):
    params = [
        nn.Parameter(torch.ones(6, 5, device=device)),
        nn.Parameter(torch.ones(7, device=device)),
    ]
    optimizer = torchium.Shampoo(
        params, eps=1e-30, exponent=exponent, grafting=grafting, momentum=0.9, update_freq=50
    )
    for scale in (1e-18, 1e-18, 1e-18, 1e16, 1e16, 1.0):
        set_gradients(params, 0)
        for p in params:
            p.grad.mul_(scale)
        optimizer.step()
    optimizer.check_errors()
    assert all_finite(optimizer)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_that_never_had_a_gradient_do_not_move_without_damping(name, dtype, device):
    params = [nn.Parameter(torch.ones(s, dtype=dtype, device=device)) for s in ((6, 4), (4,), ())]
    options = {"eps": 0.0}
    if "shampoo" in name:
        options |= {"grafting": "adam", "grafting_eps": 0.0, "preconditioner_1d": "diagonal"}
    optimizer = CASES[name](params, **options)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    for step in range(3):
        set_gradients(params, step)
        params[0].grad[2] = 0.0
        params[1].grad[1:] = 0.0
        params[2].grad.zero_()
        optimizer.step()
    optimizer.check_errors()
    assert all_finite(optimizer)
    assert not torch.equal(params[0][0], torch.ones_like(params[0][0]))
    assert_same(params[1].detach()[1:], torch.ones_like(params[1][1:]))
    assert params[2] == 1


SCALES = [1e-40, 1e-25, 1e-9, 1e-3, 1.0, 1e3, 1e8, 1e14, 1e18, 1e25, 1e38]


@pytest.mark.parametrize("name", ALL_CASES)
@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_finite_inputs(name, seed, device):
    """Inputs and output gradients of any size: weights and state stay finite."""
    generator = torch.Generator().manual_seed(seed)

    def scale() -> float:
        return SCALES[int(torch.randint(len(SCALES), (), generator=generator))]

    dtype = (torch.float32, torch.float16, torch.bfloat16, torch.float64)[seed % 4]
    model = mlp(device, dtype)
    optimizer = ALL_CASES[name](model.parameters())
    for step in range(15):
        optimizer.zero_grad()
        if name in CASES:
            set_gradients(model.parameters(), step)
            for p in model.parameters():
                p.grad.mul_(scale())
        else:
            inputs, weights = torch.randn(2, 8, 6, generator=generator)
            outputs = model((inputs * scale()).to(device, dtype))
            (outputs * (weights[:, :3] * scale()).to(device, dtype)).sum(1).mean().backward()
        step_or_report(optimizer, "in a row")
        assert all_finite(optimizer)


@pytest.mark.parametrize("split", ["pi", "plain", "exact"])
@pytest.mark.parametrize("inputs", [1e-30, 1e8, 1e15, 1e19, 1e30])
@pytest.mark.parametrize("outputs", [1e-30, 1.0, 1e10, 1e19])
def test_kfac_skips_what_its_factors_cannot_hold(split, inputs, outputs, device):
    layer = nn.Linear(5, 3).to(device)
    optimizer = torchium.KFAC(layer, TCov=1, TInv=1, damping_split=split)
    generator = torch.Generator().manual_seed(0)
    taken = 0
    for _ in range(4):
        optimizer.zero_grad()
        x = inputs * torch.randn(8, 5, generator=generator).to(device)
        (layer(x) * outputs).sum(1).mean().backward()
        taken += step_or_report(optimizer, "too large to square|failed 3 times in a row")
        assert all_finite(optimizer)
    if max(inputs, outputs) < 1e14 and inputs * outputs < 1e14:
        assert taken == 4
        assert optimizer.state[layer.weight]["step"] == 4
