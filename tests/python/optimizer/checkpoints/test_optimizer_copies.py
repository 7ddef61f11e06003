"""Copied or pickled optimizers continue bitwise identically."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from optimizer_cases import (
    all_cases,
    assert_same,
    backward,
    capturing_cases,
    ignore_fallback,
    mlp,
    plain_cases,
    run,
    set_gradients,
    snapshot,
    through_a_file,
    trained,
)
from torch import nn

pytestmark = ignore_fallback


@all_cases
def test_model_and_optimizer_copied_together_continue_bit_for_bit(make, device):
    model = mlp(device)
    optimizer = make(model.named_parameters())
    run(model, optimizer)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    assert other_optimizer.param_groups[0]["params"][0] is next(iter(other.parameters()))
    expected = run(model, optimizer, 4, 6)
    assert_same(run(other, other_optimizer, 4, 6), expected)
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


@plain_cases
def test_pickled_optimizer_continues_bit_for_bit(make):
    model, optimizer = trained(make)
    other = pickle.loads(pickle.dumps(optimizer))
    params = other.param_groups[0]["params"]
    assert params[0] is not next(iter(model.parameters()))
    expected = run(model, optimizer, 4, 6)
    for step in range(4, 10):
        set_gradients(params, step)
        other.step()
    assert_same([p.detach() for p in params], expected)
    other.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@capturing_cases
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize(
    "form", [nn.Module.parameters, lambda model: model], ids=["params", "model"]
)
def test_optimizer_copied_without_its_model_is_refused(make, copied, form):
    model = mlp()
    optimizer = make(form(model))
    run(model, optimizer)
    other = copied(optimizer)
    backward(model, 4)
    set_gradients(other.param_groups[0]["params"], 4)
    before = snapshot(other)
    with pytest.raises(RuntimeError, match=r"copy.deepcopy\(\(model, optimizer\)\)"):
        other.step()
    assert_same(snapshot(other), before)
    optimizer.step()


@all_cases
def test_a_copy_whose_first_step_fails_continues_bit_for_bit(make):
    model, optimizer = trained(make)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    other_optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        run(other, other_optimizer)
    other_optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    expected = run(model, optimizer, 4, 6)
    assert_same(run(other, other_optimizer, 4, 6), expected)


@all_cases
def test_whole_optimizer_goes_through_torch_save(make):
    model, optimizer = trained(make)
    other, other_optimizer = through_a_file((model, optimizer), weights_only=False)
    expected = run(model, optimizer, 4, 4)
    assert_same(run(other, other_optimizer, 4, 4), expected)


@plain_cases
def test_pickle_holds_no_block_storage(make):
    """A view saved with its whole buffer would make the pickle grow with the square."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(16))
    optimizer = make(layers.parameters())
    set_gradients(layers.parameters(), 0)
    optimizer.step()
    held = sum(
        t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values()
    )
    weights = sum(2 * 4 * p.numel() for p in layers.parameters())
    tensors = sum(len(state) for state in optimizer.state.values())
    assert len(pickle.dumps(optimizer)) < held + weights + 1000 * tensors
