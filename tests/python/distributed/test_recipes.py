"""Trainers of other libraries with torchium's optimizers: the pages of docs/recipes, and more.

The cases of recipe_cases.py run on two ranks, with gloo on the CPU. Those of packages that are not installed
are skipped.
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass

import pytest
import recipe_cases
import torch
import torch.distributed as dist
import torchium
from ranks import CASES, Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

RANKS = 2


def missing(name: str) -> list[str]:
    packages = recipe_cases.PACKAGES.get(name, [])
    return [package for package in packages if importlib.util.find_spec(package) is None]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """One group of processes for all cases."""
    group = Ranks(RANKS, tmp_path_factory.mktemp("recipes"))
    yield group
    group.stop()


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.xdist_group("recipes")
@pytest.mark.parametrize("name", [name for module, name in CASES if module == "recipe_cases"])
def test_on_two_ranks(group, name):
    if missing(name):
        pytest.skip(f"not installed: {', '.join(missing(name))}")
    group.check("recipe_cases", name)


def grouped(model: nn.Module) -> list[dict[str, object]]:
    """Parameter groups as torchtitan's OptimizersContainer makes them."""
    common = {"fused": True, "foreach": False, "lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6}
    decayed = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    others = [(name, p) for name, p in model.named_parameters() if p.ndim < 2]
    return [
        {
            "params": [p for _, p in named],
            "param_names": [name for name, _ in named],
            **common,
            "weight_decay": weight_decay,
        }
        for named, weight_decay in ((decayed, 0.1), (others, 0.0))
    ]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        recipe_cases.loss_of(model, recipe_cases.inputs()).backward()
        optimizer.step()


def test_groups_of_torchtitan():
    """Keys that only PyTorch's optimizers use are dropped; names come from the groups."""
    model = recipe_cases.net()
    optimizer = torchium.ShampooW(grouped(model))
    for group, weight_decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        assert not group.keys() & {"fused", "foreach"}
        assert (group["grafting_eps"], group["weight_decay"]) == (1e-6, weight_decay)
    assert [p.name for p in optimizer.report().parameters][:2] == ["0.weight", "2.weight"]


def test_checkpoints_of_torchtitan():
    """Flat state, which a step with zero gradients and lr=0 creates before it is loaded."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = recipe_cases.net()
    optimizer = torchium.ShampooW(grouped(model))
    step(model, optimizer, 4)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    start = copy.deepcopy(model.state_dict())
    assert "state.0.weight.statistics.0" in saved
    assert "param_groups.0.weight.grafting_eps" in saved

    resumed = recipe_cases.net()
    fresh = torchium.ShampooW(grouped(resumed))
    before = recipe_cases.values(resumed)
    get_optimizer_state_dict(resumed, fresh, options=options)
    assert torch.equal(recipe_cases.values(resumed), before)
    resumed.load_state_dict(start)
    set_optimizer_state_dict(resumed, fresh, saved, options=options)
    for each, own in ((model, optimizer), (resumed, fresh)):
        step(each, own, 3)
    assert torch.equal(recipe_cases.values(resumed), recipe_cases.values(model))


@pytest.mark.parametrize("grouped_by_pattern", [False, True], ids=["0.2", "0.3"])
def test_container_of_torchtitan(grouped_by_pattern):
    module = pytest.importorskip("torchtitan.components.optimizer", reason="torchtitan is missing")
    if grouped_by_pattern != hasattr(module, "ParamGroupConfig"):
        pytest.skip("another version of torchtitan is installed")
    model = recipe_cases.net()
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    if grouped_by_pattern:

        class Optimizers(module.OptimizersContainer):
            @dataclass(kw_only=True, slots=True)
            class Config(module.OptimizersContainer.Config):
                pass

            @staticmethod
            def _resolve_optimizer_factory(name: str) -> object:
                return {"ShampooW": torchium.ShampooW}[name]

        group = module.ParamGroupConfig(
            pattern=".*", optimizer_name="ShampooW", optimizer_kwargs=options
        )
        optimizer = Optimizers.Config(param_groups=[group]).build(model_parts=[model])
    else:
        options |= {"fused": True, "foreach": False}
        optimizer = module.OptimizersContainer([model], torchium.ShampooW, options)
    step(model, optimizer, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    end = recipe_cases.values(model)
    start = copy.deepcopy(model.state_dict())
    step(model, optimizer, 2)
    after = recipe_cases.values(model)
    assert not torch.equal(after, end)
    model.load_state_dict(start)
    optimizer.load_state_dict(saved)
    step(model, optimizer, 2)
    assert torch.equal(recipe_cases.values(model), after)
