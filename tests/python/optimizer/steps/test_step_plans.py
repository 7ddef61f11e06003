"""Data that an optimizer keeps between steps stays valid: every change of identity is detected."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchium
from captured_layers import Conv1D
from optimizer_cases import (
    CASES,
    all_cases,
    assert_goes_on_as_a_copy,
    assert_same,
    capturing_cases,
    ignore_fallback,
    mlp,
    plain_cases,
    run,
    set_gradients,
    trained,
    values,
)
from torch import nn
from torchium.optimizers._blocked.base import BlockedOptimizer

pytestmark = ignore_fallback

Change = Callable[[nn.Sequential, Any], None]


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one entry per binding of the plans to parameters and state."""
    calls: list[int] = []
    bind = BlockedOptimizer._bind

    def counted(self: BlockedOptimizer, **arguments: Any) -> None:
        calls.append(0)
        bind(self, **arguments)

    monkeypatch.setattr(BlockedOptimizer, "_bind", counted)
    return calls


# ---- identities


def other_memory_of_a_parameter(model, optimizer):
    model[0].weight.data = model[0].weight.data.clone() + 0.5


def other_strides_of_a_parameter(model, optimizer):
    weight = model[0].weight
    weight.data = weight.data.t().contiguous().t()


def other_dtype(model, optimizer):
    model.double()


def other_state_tensors(model, optimizer):
    for state in optimizer.state.values():
        for key, value in state.items():
            if value.is_floating_point() and key != "step":
                state[key] = 1.5 * value


def other_memory_of_state_tensors(model, optimizer):
    for state in optimizer.state.values():
        for key, value in state.items():
            if value.is_floating_point() and key != "step":
                value.data = 1.5 * value


def other_count(model, optimizer):
    for state in optimizer.state.values():
        state["step"] = state["step"] + 16


def state_of_one_afresh(model, optimizer):
    del optimizer.state[model[3].weight]


def late_group(model, optimizer):
    model.append(nn.Linear(3, 2).to(model[0].weight))
    optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.5})


def parameter_leaves_its_group(model, optimizer):
    del optimizer.state[optimizer.param_groups[0]["params"].pop()]


CHANGES = [
    other_memory_of_a_parameter,
    other_strides_of_a_parameter,
    other_dtype,
    other_state_tensors,
    other_memory_of_state_tensors,
    other_count,
    state_of_one_afresh,
    late_group,
    parameter_leaves_its_group,
]


@plain_cases
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_identity_is_bound_again(make, change: Change, bindings, device):
    model, optimizer = trained(make, device)
    bindings.clear()
    change(model, optimizer)
    assert_goes_on_as_a_copy(model, optimizer)
    assert bindings.count(0) == 2  # once for the optimizer, once for its copy


@capturing_cases
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_identity_is_noticed_by_optimizers_that_capture(make, change, device):
    model, optimizer = trained(make, device)
    change(model, optimizer)
    assert_goes_on_as_a_copy(model, optimizer, steps=4)


@all_cases
def test_a_parameter_that_moves_to_the_next_group_is_noticed(make, device):
    """All parameters together keep their order."""
    model = mlp(device)
    params = list(model.parameters())
    optimizer = make([{"params": params[:3]}, {"params": params[3:], "lr": 0.5}])
    run(model, optimizer)
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop())
    assert_goes_on_as_a_copy(model, optimizer, steps=4)


@pytest.mark.parametrize("change", CHANGES[:3])
def test_a_transposed_weight_that_changes_identity_is_noticed(change, device):
    """The plan of K-FAC holds views of it and of its momentum."""
    model = mlp()
    model[0] = Conv1D(5, 6)
    model.to(device)
    optimizer = torchium.KFAC(model.parameters(), lr=0.02, kl_clip=None)
    run(model, optimizer)
    change(model, optimizer)
    assert_goes_on_as_a_copy(model, optimizer)


# ---- changes without a new identity


@plain_cases
def test_equal_steps_bind_once(make, bindings, device):
    model = mlp(device)
    run(model, make(model.parameters()), steps=6)
    assert bindings == [0]


def freeze(model, optimizer):
    model[0].bias.requires_grad_(False)
    optimizer.zero_grad()


def thaw(model, optimizer):
    model[0].bias.requires_grad_(True)


@plain_cases
def test_another_set_of_gradients_needs_no_binding(make, bindings, device):
    model, optimizer = trained(make, device)
    for change in (freeze, thaw, freeze):
        change(model, optimizer)
        assert_goes_on_as_a_copy(model, optimizer)
    assert bindings.count(0) == 4  # once for the optimizer, once for each copy


@capturing_cases
def test_frozen_and_thawed_parameters_of_optimizers_that_capture(make, device):
    model, optimizer = trained(make, device)
    for change in (freeze, thaw, freeze):
        change(model, optimizer)
        assert_goes_on_as_a_copy(model, optimizer, steps=3)


@plain_cases
def test_groups_that_take_turns_bind_once(make, bindings, device):
    model = mlp(device)
    groups = [list(model[0].parameters()), list(model[3].parameters())]
    optimizer = make([{"params": params} for params in groups])
    set_gradients([p for params in groups for p in params], 0)
    optimizer.step()
    for step in range(6):
        optimizer.zero_grad()
        set_gradients(groups[step % 2], step)
        optimizer.step()
    assert bindings == [0]


def test_state_that_lies_apart_is_laid_side_by_side_when_plans_are_bound():
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    params = list(layers.parameters())
    optimizer = torchium.Shampoo(params)
    set_gradients(params, 0)
    optimizer.step()
    for p in params:
        optimizer.state[p]["statistics.0"] = optimizer.state[p]["statistics.0"].clone()
    expected = [optimizer.state[p]["statistics.0"].clone() for p in params]
    optimizer.param_groups[0]["update_freq"] = 10**6
    optimizer.update_preconditioners()
    found = [optimizer.state[p]["statistics.0"] for p in params]
    assert len({r.untyped_storage().data_ptr() for r in found}) == 1
    assert_same(found, expected)


@plain_cases
def test_gradients_may_lie_elsewhere_in_every_step(make, bindings, device):
    models = [mlp(device) for _ in range(2)]
    optimizers = [make(m.parameters()) for m in models]
    for step in range(6):
        for model in models:
            set_gradients(model.parameters(), step)
        for p in models[step % 2].parameters():
            p.grad = torch.stack([p.grad, p.grad], -1)[..., 1]
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(values(models[0]), values(models[1]))
    assert bindings == [0, 0]


OPTIONS = [
    {"eps": 1e-2},
    {"update_freq": 1},
    {"weight_decay": 0.3},
    {"weight_decay": 0.3, "decoupled_weight_decay": True},
    {"momentum": 0.5},
    {"betas": (0.5, 0.9)},
    {"betas": (0.0, 1.0)},
    {"exponent": -0.3, "exponent_warmup": 20},
    {"start_preconditioning_step": 30},
    {"maximize": True},
    {"root_method": "newton"},
    {"grafting": "sgd"},
    {"max_root_failures": 5},
    {"lr": 0.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["shampoo", "shampoo_all_buffers"])
def test_options_that_are_set_later_are_those_of_the_next_step(name, options, device):
    model = mlp(device)
    optimizer = CASES[name](model.parameters())
    run(model, optimizer)
    optimizer.param_groups[0].update(options)
    assert_goes_on_as_a_copy(model, optimizer, steps=3)


def test_a_schedule_of_numbers_binds_nothing(bindings):
    model = mlp()
    optimizer = torchium.Shampoo(model.parameters(), betas=(0.9, 0.99), momentum=0.9)
    for step in range(6):
        group = optimizer.param_groups[0]
        group["betas"], group["momentum"] = (0.9 - 0.01 * step, 0.99), 0.9 - 0.01 * step
        group["lr"] = 0.1 / (1 + step)
        set_gradients(model.parameters(), step)
        optimizer.step()
    assert bindings == [0]


# ---- an update of preconditioners


def test_an_update_of_preconditioners_sees_options_and_state(device):
    model = mlp(device)
    optimizer = torchium.Shampoo(model.parameters(), update_freq=1000)
    run(model, optimizer)
    optimizer.param_groups[0].update(eps=1e-1, betas=(0.9, 1.0))
    other_state_tensors(model, optimizer)
    _, other = copy.deepcopy((model, optimizer))
    optimizer.update_preconditioners()
    other.update_preconditioners()
    assert_same(optimizer.state_dict(), other.state_dict())
    assert_goes_on_as_a_copy(model, optimizer)


# ---- memory


def test_no_gradient_outlives_its_step(device):
    param = nn.Parameter(torch.ones(8, 8, device=device))
    optimizer = torchium.Shampoo([param])
    for _ in range(2):
        param.grad = torch.ones(8, 8, device=device)
        grad = weakref.ref(param.grad)  # lives as long as the core holds it
        optimizer.step()
        optimizer.zero_grad()
        assert grad() is None


def idle_problem(device, **options):
    """Two parameters, of which the second is idle in some steps."""
    params = [nn.Parameter(torch.ones(4, 3, device=device)) for _ in range(2)]
    return params, torchium.Shampoo(params, lr=0.01, update_freq=2, **options)


def idle_step(params, optimizer, index: int, active: int) -> None:
    generator = torch.Generator().manual_seed(index)
    for i, p in enumerate(params):
        noise = torch.randn(p.shape, generator=generator).to(p.device)
        p.grad = noise if i < active else None
    optimizer.step()


@pytest.mark.parametrize("options", [{"betas": (0.9, 0.99)}, {"momentum": 0.9}])
def test_an_option_that_is_set_while_a_parameter_is_idle(options, device):
    params, optimizer = idle_problem(device)
    idle_step(params, optimizer, 0, 2)
    optimizer.param_groups[0].update(options)
    idle_step(params, optimizer, 1, 1)
    idle_step(params, optimizer, 2, 2)
    alone, other = idle_problem(device)
    idle_step(alone, other, 0, 2)
    other.param_groups[0].update(options)
    idle_step(alone, other, 1, 1)
    other.load_state_dict(other.state_dict())  # checks everything again
    idle_step(alone, other, 2, 2)
    assert_same([p.detach() for p in params], [p.detach() for p in alone])


def test_an_average_that_paused_while_a_parameter_was_idle_starts_afresh(device):
    params, optimizer = idle_problem(device, betas=(0.9, 0.99))
    idle_step(params, optimizer, 0, 2)
    optimizer.param_groups[0]["betas"] = (0.0, 0.99)
    idle_step(params, optimizer, 1, 1)
    idle_step(params, optimizer, 2, 2)
    assert "exp_avg" not in optimizer.state[params[1]]
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    idle_step(params, optimizer, 3, 2)
    assert optimizer.state[params[1]]["exp_avg_start"] == 2


def test_roots_of_idle_parameters_are_renewed(device):
    params, optimizer = idle_problem(device)
    idle_step(params, optimizer, 0, 2)
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    idle_step(params, optimizer, 1, 1)
    optimizer.state[params[1]]["roots.0"].zero_()
    optimizer.update_preconditioners()
    assert optimizer.state[params[1]]["roots.0"].any()


def test_an_idle_parameter_whose_state_does_not_fit_is_named(device):
    params, optimizer = idle_problem(device)
    idle_step(params, optimizer, 0, 2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2, device=device))]})
    optimizer.param_groups[1]["block_size"] = 2
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].append(moved)
    idle_step(params, optimizer, 1, 1)
    with pytest.raises(ValueError, match="block_size"):
        idle_step(params, optimizer, 2, 2)


@pytest.mark.parametrize("change", [torch.Tensor.double, torch.Tensor.cpu])
def test_replaced_state_of_another_dtype_or_device_follows(change, device):
    results = []
    for replaces in (False, True):
        params, optimizer = idle_problem(device)
        idle_step(params, optimizer, 0, 2)
        if replaces:
            for state in optimizer.state.values():
                for key in ("statistics.0", "roots.1"):
                    state[key] = change(state[key])
        for index in range(1, 4):
            idle_step(params, optimizer, index, 2)
        dtypes = {v.dtype for s in optimizer.state.values() for v in s.values()}
        assert dtypes == {torch.float32, torch.float64, torch.int32}
        assert optimizer.state[params[0]]["statistics.0"].dtype == torch.float32
        assert optimizer.state[params[0]]["statistics.0"].device == params[0].device
        results.append([p.detach() for p in params])
    assert_same(*results)


def test_removed_parameters_are_not_kept(device):
    params, optimizer = idle_problem(device)
    idle_step(params, optimizer, 0, 2)
    gone = weakref.ref(params[1])
    del optimizer.state[params[1]]
    optimizer.param_groups[0]["params"].pop()
    params.pop()
    idle_step(params, optimizer, 1, 1)
    gc.collect()
    assert gone() is None
