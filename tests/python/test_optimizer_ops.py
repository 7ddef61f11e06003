"""What the core does below the optimizers: initial state, and state that is unusual or does not fit."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from optimizer_cases import CASES, mlp, run, set_gradients, values
from torch.library import opcheck

ops = torch.ops.torchium
SHAPES = [(4, 3), (5,), (6, 6), (), (3, 2, 2, 2)]
NAMES = ["shampoo", "shampoo_all_buffers", "adagrad", "adagrad_full"]


def test_opcheck_of_initial_state(device):
    params = [torch.full(s, 0.5, device=device) for s in SHAPES]
    layout = {"block_size": 4, "merge_dims": True, "preconditioner_1d": "full"}
    opcheck(ops.shampoo_init_state.default, (params,), layout)
    options = {"block_size": 8, "initial_accumulator_value": 0.1}
    opcheck(ops.adagrad_init_state.default, (params,), options)


@pytest.mark.parametrize("name", NAMES)
def test_any_layout_of_the_state_gives_the_same_step(name, device):
    """Buffers of many blocks are speed only: blocks that lie apart are as good."""
    results = []
    for apart in (False, True):
        model = mlp(device)
        optimizer = CASES[name](model.parameters())
        run(model, optimizer, steps=1)
        if apart:
            for state in optimizer.state.values():
                state.update({key: value.clone() for key, value in state.items()})
        run(model, optimizer, first=1, steps=3)
        results.append(values(model))
    torch.testing.assert_close(*results)


def test_state_that_does_not_fit_is_refused_and_nothing_changes():
    for name in NAMES:
        model = mlp()
        params = list(model.parameters())
        optimizer = CASES[name](params)
        run(model, optimizer, steps=2)
        group = optimizer.param_groups[0]
        core = getattr(torch.classes.torchium, optimizer._PLAN)(torch.device("cpu"))
        core.set_options(tuple(chain.from_iterable((k, group[k]) for k in optimizer._CHECKS)))
        states = [dict(optimizer.state[p]) for p in params]
        set_gradients(params, 2)
        before = values(model)
        core.bind(params, states, [2] * len(params))
        assert core.prepare()
        for key in states[0].keys() - {"step"}:
            for damaged in (torch.zeros(7, 7), torch.zeros(7)):
                core.bind(params, [{**states[0], key: damaged}, *states[1:]], [2] * len(params))
                with pytest.raises(ValueError, match=key.split(".")[0]):
                    core.prepare()
        torch.testing.assert_close(values(model), before, rtol=0, atol=0)
