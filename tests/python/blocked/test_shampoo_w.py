"""torchium.ShampooW: AdamW's signature, its groups, and shared behaviour with Shampoo."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torchium
from optimizer_cases import assert_same, mlp, run, set_gradients
from torch import nn


def test_signature_is_adamws():
    ours = inspect.signature(torchium.ShampooW).parameters
    theirs = inspect.signature(torch.optim.AdamW).parameters
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


def test_is_what_from_adamw_gives():
    first, second = mlp(), mlp()
    options = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "update_freq": 3}
    ours = torchium.ShampooW(first.parameters(), **options)
    theirs = torchium.Shampoo.from_adamw(second.parameters(), **options)
    assert type(theirs) is torchium.ShampooW
    assert ours.defaults == theirs.defaults
    assert_same(run(first, ours), run(second, theirs))
    frequency = {"update_freq": options.pop("update_freq")}
    adamw = torch.optim.AdamW(second.parameters(), **options)
    taken = torchium.Shampoo.from_adamw(adamw, **frequency)
    assert taken.defaults == ours.defaults


def test_its_state_dict_is_that_of_a_shampoo():
    models = [mlp(), mlp()]
    ours = torchium.ShampooW(models[0].parameters(), lr=0.01, update_freq=2)
    run(models[0], ours)
    defaults = {key: value for key, value in ours.defaults.items()}
    theirs = torchium.Shampoo(models[1].parameters(), **defaults)
    theirs.load_state_dict(ours.state_dict())
    models[1].load_state_dict(models[0].state_dict())
    assert_same(run(models[1], theirs, 4), run(models[0], ours, 4))
    ours.load_state_dict(theirs.state_dict())
    assert_same(ours.state_dict(), theirs.state_dict())


def test_groups_are_in_adamws_terms():
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torchium.ShampooW([{"params": [first], "eps": 1e-3}, {"params": [second]}])
    optimizer.add_param_group({"params": [third], "eps": 1e-4, "betas": (0.5, 0.6), "fused": True})
    eps = [(group["eps"], group["grafting_eps"]) for group in optimizer.param_groups]
    assert eps == [(1e-3 * 1e-3, 1e-3), (1e-8 * 1e-8, 1e-8), (1e-4 * 1e-4, 1e-4)]
    assert optimizer.param_groups[2]["betas"] == (0.5, 0.6)
    assert "fused" not in optimizer.param_groups[2]
    before = len(optimizer.param_groups)
    for bad in ({"amsgrad": True}, {"differentiable": True}, {"eps": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **bad})
    assert len(optimizer.param_groups) == before
    with pytest.raises(TypeError, match="dict"):
        optimizer.add_param_group([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_go_on_alike(duplicate):
    model = mlp()
    optimizer = torchium.ShampooW(model.parameters(), lr=0.01)
    run(model, optimizer)
    copied_model, copied = duplicate((model, optimizer))
    assert type(copied) is torchium.ShampooW
    assert_same(run(copied_model, copied, 4), run(model, optimizer, 4))
    copied.add_param_group({"params": [nn.Parameter(torch.ones(2))], "eps": 1e-3})
    assert copied.param_groups[1]["grafting_eps"] == 1e-3


def test_stands_where_a_class_is_expected():
    """As transformers.Trainer calls optimizer_cls_and_kwargs: groups, then AdamW's keywords."""
    model = mlp()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torchium.ShampooW(groups, lr=5e-5, betas=(0.9, 0.999), eps=1e-8)
    assert issubclass(torchium.ShampooW, torch.optim.Optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    by_name = torchium.create_optimizer("ShampooW", model.parameters(), lr=0.01)
    assert type(by_name) is torchium.ShampooW


def test_the_first_step_is_as_long_as_adamws():
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = (
        torchium.ShampooW([ours], 0.01, (0.9, 0.99), 1e-8, 0.0),
        torch.optim.AdamW([theirs], 0.01, (0.9, 0.99), 1e-8, 0.0),
    )
    for optimizer, p in zip(optimizers, (ours, theirs), strict=True):
        set_gradients([p], 0)
        optimizer.step()
    torch.testing.assert_close((ours - start).norm(), (theirs - start).norm())


def test_refuses_unknown_options():
    with pytest.raises(TypeError, match="no_option"):
        torchium.ShampooW([nn.Parameter(torch.ones(2))], no_option=1)
    with pytest.raises(ValueError, match="amsgrad=True"):
        torchium.ShampooW([nn.Parameter(torch.ones(2))], amsgrad=True)


def test_its_own_groups_and_defaults_are_taken_as_they_are():
    optimizer = torchium.ShampooW(mlp().parameters(), eps=1e-3, lr=0.1)
    (group,) = optimizer.param_groups
    assert (group["eps"], group["grafting_eps"]) == (1e-6, 1e-3)

    def options(other: torchium.ShampooW) -> list[dict]:
        return [{k: v for k, v in g.items() if k != "params"} for g in other.param_groups]

    of_groups = torchium.ShampooW([dict(g) for g in optimizer.param_groups])
    of_defaults = torchium.ShampooW(mlp().parameters(), **optimizer.defaults)
    assert options(of_groups) == options(of_defaults) == options(optimizer)
    assert of_defaults.defaults == optimizer.defaults
    optimizer.add_param_group({**group, "params": list(mlp().parameters())})
    assert options(optimizer) == [options(of_groups)[0]] * 2
    # Single options of Shampoo leave AdamW's eps unchanged.
    optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(2))], "eps": 1e-2, "momentum": 0.5}
    )
    assert optimizer.param_groups[2]["eps"] == 1e-4
