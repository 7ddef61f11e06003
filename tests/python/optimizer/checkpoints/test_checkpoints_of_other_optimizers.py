"""State dicts of another kind of optimizer are refused."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from optimizer_cases import ALL_CASES, all_cases, ignore_fallback, mlp, run

pytestmark = ignore_fallback


@cache
def trained_with(other: Any) -> torch.optim.Optimizer:
    """An optimizer after some steps, by the name of a case or its class."""
    model = mlp()
    make = ALL_CASES[other] if isinstance(other, str) else other
    optimizer = make(model.parameters(), lr=0.1)
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.param_groups[0]["momentum"] = 0.9
    run(model, optimizer)
    return optimizer


@pytest.mark.parametrize("name", ALL_CASES)
@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.Adam, *ALL_CASES])
def test_state_of_another_kind_of_optimizer_is_refused(name, other):
    optimizer = trained_with(other)
    loader = ALL_CASES[name](mlp().parameters())
    if type(loader) is type(optimizer):  # the options come with the checkpoint
        loader.load_state_dict(optimizer.state_dict())
        return
    # Those of torch.optim.Adagrad fit; natural gradient and K-FAC have options of the same names.
    message = r"is not one of|Adam or AdamW|solver must|missing|unexpected"
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(optimizer.state_dict())
    assert not any(loader.state.values())


@all_cases
@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.AdamW])
def test_options_of_another_kind_of_optimizer_are_refused(make, other):
    optimizer = make(mlp().parameters())
    before = copy.deepcopy(optimizer.defaults)
    with pytest.raises(ValueError, match=r"state_dict is not one of .* is missing from parameter"):
        optimizer.load_state_dict(other(mlp().parameters(), lr=0.125).state_dict())
    assert all(optimizer.param_groups[0][name] == value for name, value in before.items())
