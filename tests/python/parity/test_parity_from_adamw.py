"""Shampoo.from_adamw is the same in C++ and Python."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torchium
from optimizer_cases import set_gradients
from parity_tools import assert_same, state_of
from torch import nn

pytest.importorskip("torchium_cpp._C", exc_type=ImportError)

SHAPES = ((9, 6), (7,), (3, 2, 3, 3), ())
HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": {
        "lr": 0.01,
        "betas": (0.8, 0.95),
        "eps": 1e-5,
        "weight_decay": 0.2,
        "maximize": True,
        "amsgrad": False,
    },
    "shampoo": {"lr": 0.01, "update_freq": 2, "block_size": 4, "relative_eps": 1e-3},
    "more_shampoo": {"grafting_eps": 1e-6, "decoupled_weight_decay": False, "grafting": "rmsprop"},
}


def from_adamw(language: str, params: Any, **hyperparameters: Any) -> Any:
    if language == "python":
        return torchium.Shampoo.from_adamw(params, **hyperparameters)
    return importlib.import_module("torchium_cpp._C").optim.Shampoo.from_adamw(
        params, **hyperparameters
    )


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize("case", HYPERPARAMETERS)
def test_options_and_trajectory(case):
    ended = {}
    for language in ("python", "cpp"):
        params = parameters()
        optimizer = from_adamw(language, params, **HYPERPARAMETERS[case])
        for step in range(12):
            set_gradients(params, step)
            optimizer.step()
        ended[language] = [(p.detach(), state_of(optimizer, p)) for p in params]
        if language == "python":
            (group,) = optimizer.param_groups
        else:
            assert {key: group[key] for key in optimizer.options()} == optimizer.options()
    assert_same(ended["python"], ended["cpp"])


def test_groups_of_parameters():
    options = []
    for language in ("python", "cpp"):
        first, second, *_ = parameters()
        groups = [
            {"params": [first], "eps": 1e-4, "weight_decay": 0.0},
            {"params": [second], "lr": 0.5, "betas": (0.7, 0.8)},
        ]
        optimizer = from_adamw(language, groups, lr=0.1, update_freq=5)
        if language == "python":
            options = optimizer.param_groups
        else:
            for index, group in enumerate(options):
                expected = optimizer.options(index)
                assert {key: group[key] for key in expected} == expected
    assert options[0]["update_freq"] == 5


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"eps": -1.0}, "eps"),
        ({"lr": -1.0}, "lr"),
        ({"relative_eps": -1.0}, "relative_eps"),
    ],
)
def test_both_refuse_the_same(hyperparameters, message):
    for language in ("python", "cpp"):
        with pytest.raises(ValueError, match=message):
            from_adamw(language, parameters(), **hyperparameters)
