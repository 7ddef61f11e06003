"""Capture by optimizers: how it finds layers, and how long it keeps what."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torchium
from capture_cases import backward, batch, both, checkpointed, net, train
from optimizer_cases import assert_same, snapshot, values
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as nn_module

pytestmark = pytest.mark.filterwarnings(
    "ignore:KFAC preconditions",
    "ignore:Using `torch.compile\\(module\\)` when there are global",
    "ignore:`torch.jit.trace",
)

# ---- finding the layers


def global_hooks() -> int:
    return len(nn_module._global_forward_hooks)


@both
def test_the_global_hook_goes_when_all_layers_are_found(make):
    model = net()
    before = global_hooks()
    optimizer = make(model)
    assert global_hooks() == before  # the model provides its layers
    optimizer = make(model.parameters())
    assert global_hooks() == before + 1
    backward(model, 0)
    assert global_hooks() == before + 1
    optimizer.step()
    assert global_hooks() == before
    optimizer.add_param_group({"params": list(nn.Linear(2, 2).parameters())})
    assert global_hooks() == before + 1
    del optimizer
    gc.collect()
    assert global_hooks() == before


@both
def test_a_second_owner_of_a_tied_weight_is_seen(make):
    """It runs after the first one has been found."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.a(torch.tanh(self.a(x)))

    tied, twice = Tied(), Twice()
    twice.load_state_dict({"a.weight": tied.a.weight})
    x = torch.randn(5, 4)
    for model in (tied, twice):
        optimizer = make(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(tied.a.weight, twice.a.weight)


@both
def test_a_layer_added_in_mid_training_is_found(make):
    model = net()
    optimizer = make(
        [*model.conv.parameters(), *model.norm.parameters(), *model.twice.parameters()]
    )
    backward(model, 0)
    optimizer.step()
    optimizer.add_param_group({"params": list(model.last.parameters())})
    for step in range(1, 4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    assert optimizer.state[model.last.weight]["step"] == 3
    if isinstance(optimizer, torchium.KFAC):
        assert optimizer.state[model.last.weight]["factor_updates"] == 2


# ---- lifetimes


def freed(reference: weakref.ref) -> bool:
    gc.collect()
    return reference() is None


@both
def test_everything_goes_with_the_optimizer(make):
    make(net())  # torch keeps the frames of the process's first optimizer
    model = net()
    optimizer = make(model.parameters())
    backward(model, 0)
    reference, capture = weakref.ref(optimizer), weakref.ref(optimizer._capture)
    before = [len(m._forward_hooks) for m in model.modules()]
    assert sum(before) > 0
    del optimizer
    assert freed(reference)
    assert freed(capture)
    assert not any(m._forward_hooks or m._forward_hooks_with_kwargs for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
    backward(model, 1)


@both
def test_the_optimizer_may_go_between_forward_and_backward(make):
    model = net()
    optimizer = make(model)
    x, y = batch(0)
    loss = F.cross_entropy(model(x), y)
    del optimizer
    gc.collect()
    loss.backward()


@both
def test_inputs_are_freed_by_the_backward_pass(make):
    """Although the output, and so its hooks, may live on."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = make(model)
    inputs = []
    model[2].register_forward_pre_hook(lambda m, args: inputs.append(weakref.ref(args[0])))
    output = model(torch.randn(3, 4))
    assert inputs[0]() is not None
    output.sum().backward()
    optimizer.step()
    assert freed(inputs[0])
    assert output.grad_fn is not None


@both
def test_checkpointing_saves_the_memory_of_the_inputs(make):
    model = net()
    make(model)
    inputs = []
    model.last.register_forward_pre_hook(lambda m, args: inputs.append(weakref.ref(args[0])))
    x, y = batch(0)
    output = checkpointed(use_reentrant=False)(model, x)
    assert freed(inputs[0])
    F.cross_entropy(output, y).backward()


@both
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_the_model_belongs_to_no_optimizer(make, copied):
    model = net()
    optimizer = make(model)
    train(model, optimizer, steps=1)
    other = copied(model)
    start = values(other)
    optimizer.zero_grad()
    backward(model, 1)
    backward(other, 60)
    optimizer.step()
    assert not any(m._forward_hooks or m._forward_hooks_with_kwargs for m in other.modules())
    assert_same(values(other), start)
    plain = net()
    assert_same(values(model), train(plain, make(plain), steps=2))


@both
def test_more_than_one_process_is_refused(make, monkeypatch):
    model = net()
    optimizer = make(model)
    backward(model, 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"has no process_group, but 2 processes run"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    backward(model, 0)
    optimizer.step()
