"""State dicts that do not fit the optimizer: an error that names what is wrong, and nothing loaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchium
from optimizer_cases import ALL_CASES, all_cases, assert_same, ignore_fallback, mlp, run, snapshot
from torch import nn

pytestmark = ignore_fallback


def _first(state_dict: dict) -> dict:
    return state_dict["state"][0]


def _matrix_key(state: dict) -> str:
    return next(
        k for k in ("statistics.0", "sum", "A", "K", "inputs.0", "momentum_buffer") if k in state
    )


def drop_group(d):
    d["param_groups"].pop()


def drop_parameter(d):
    d["param_groups"][0]["params"].pop()


def drop_param_groups(d):
    del d["param_groups"]


def drop_matrix(d):
    del _first(d)[_matrix_key(_first(d))]


def drop_step(d):
    del _first(d)["step"]


def add_key(d):
    _first(d)["exp_avg_sq"] = torch.zeros(5, 6)


def reshape_matrix(d):
    state = _first(d)
    key = _matrix_key(state)
    state[key] = torch.cat([state[key], state[key]])


def transpose_parameter(d):
    state = _first(d)
    for key in state:
        if state[key].dim() == 2:
            state[key] = state[key].mT.contiguous()
    if "statistics.0" in state:
        state["statistics.0"] = torch.zeros(1, 17, 17)
    if "A" in state:
        state["A"] = torch.zeros(1, 17, 17)


def make_sparse(d):
    state = _first(d)
    state[_matrix_key(state)] = state[_matrix_key(state)].to_sparse()


def make_complex(d):
    state = _first(d)
    state[_matrix_key(state)] = state[_matrix_key(state)].to(torch.complex64)


def make_integer(d):
    state = _first(d)
    state[_matrix_key(state)] = state[_matrix_key(state)].to(torch.int64)


def move_to_meta(d):
    state = _first(d)
    state[_matrix_key(state)] = state[_matrix_key(state)].to("meta")


def make_text(d):
    _first(d)[_matrix_key(_first(d))] = "a matrix"


def state_is_no_dict(d):
    d["state"][0] = torch.ones(3)


def add_state_of_nobody(d):
    d["state"][99] = dict(_first(d))


def last_state_is_wrong(d):
    last = [state for state in d["state"].values() if len(state) > 1][-1]
    del last["step"]


def option_out_of_range(d):
    d["param_groups"][-1]["lr"] = -1.0


WITHOUT_MATRICES = {"natural_gradient", "shampoo_unpreconditioned"}
DAMAGES = {
    drop_group: "parameter groups",
    drop_parameter: "parameters",
    drop_param_groups: "param_groups",
    drop_matrix: "missing",
    drop_step: "missing.*step",
    add_key: "Adam or AdamW .*exp_avg_sq",
    reshape_matrix: r"shape \[.*\].*needs \[.*\]",
    transpose_parameter: r"shape \[.*\].*needs \[.*\]|int64 tensor \[J, 17\]",
    make_sparse: "dense",
    make_complex: "dtype",
    make_integer: "dtype",
    move_to_meta: "on the meta device.*map_location='cpu'",
    make_text: "tensor",
    state_is_no_dict: "dict",
    add_state_of_nobody: "99",
    last_state_is_wrong: "missing.*step",
    option_out_of_range: "lr",
}


@pytest.mark.parametrize("name", sorted(ALL_CASES.keys() - WITHOUT_MATRICES))
def test_checkpoint_that_does_not_fit_loads_nothing(name):
    model = mlp()
    layers = [{"params": list(model[0].parameters())}]
    layers.append({"params": [*model[1].parameters(), *model[3].parameters()]})
    optimizer = ALL_CASES[name](layers)
    run(model, optimizer)
    good = optimizer.state_dict()
    good["param_groups"][0]["lr"] = 0.125
    run(model, optimizer, 4, 1)
    before = snapshot(optimizer)
    groups = copy.deepcopy(
        [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    )
    for damage, message in DAMAGES.items():
        state_dict = copy.deepcopy(good)
        damage(state_dict)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
        assert_same(snapshot(optimizer), before)
        assert groups == [
            {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
        ]
    run(model, optimizer, 5, 1)


@all_cases
@pytest.mark.parametrize(
    "state_dict",
    [
        None,
        [],
        {},
        {"state": {}},
        "text",
        {"state": [], "param_groups": []},
        {"state": {}, "param_groups": [{"lr": 0.1}]},
        {"state": {}, "param_groups": [[0, 1]]},
    ],
    ids=str,
)
def test_what_is_no_state_dict_is_refused(make, state_dict):
    with pytest.raises(ValueError, match="state_dict"):
        make(mlp().parameters()).load_state_dict(state_dict)


def test_the_message_names_the_parameter():
    model = mlp()
    optimizer = torchium.Shampoo(model.named_parameters())
    run(model, optimizer)
    state_dict = optimizer.state_dict()
    state_dict["state"][0]["statistics.1"] = torch.zeros(1, 2, 2)
    message = r"'statistics.1' of parameter '0.weight'.*shape \[1, 2, 2\].*needs \[1, 6, 6\]"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)


COUNTS_AND_SQUARES = (
    *("step", "factor_updates", "moment_updates"),
    *("sum", "diagonal", "grafting_second_moment"),
)


def bad_numbers(state: dict) -> dict[str, list[float]]:
    """Invalid values for the entries of each saved tensor."""
    bad = {
        key: [float("nan"), float("inf"), float("-inf")]
        for key, value in state.items()
        if value.is_floating_point()
    }
    for key in COUNTS_AND_SQUARES:
        if key in bad:
            bad[key].append(-1.0)
    bad |= {key: [-1.0] for key in state if key.startswith("root_failures")}
    bad["step"].append(2.5)
    return bad


@pytest.mark.parametrize("name", ALL_CASES)
def test_numbers_that_no_run_has_are_refused_by_the_name_of_their_key(name):
    model = mlp()
    optimizer = ALL_CASES[name](model.named_parameters())
    run(model, optimizer)
    good = optimizer.state_dict()
    run(model, optimizer, 4, 1)
    before = snapshot(optimizer)
    tried = 0
    for index, state in good["state"].items():
        for key, values_of_key in bad_numbers(state).items():
            for value in values_of_key:
                wrong_tensor = state[key].clone()
                wrong_tensor.view(-1)[-1:] = value
                states = {**good["state"], index: {**state, key: wrong_tensor}}
                bad = {**good, "state": states}
                wrong = {-1.0: "below 0", 2.5: "no whole number"}.get(value, "not finite")
                parameter = bad["param_groups"][0]["param_names"][index]
                with pytest.raises(
                    ValueError, match=f"'{key}' of parameter '{parameter}'.*{wrong}"
                ):
                    optimizer.load_state_dict(bad)
                tried += 1
    assert tried > 10
    assert_same(snapshot(optimizer), before)
    optimizer.load_state_dict(good)


@all_cases
def test_the_same_parameters_in_another_order_are_refused(make):
    """Shapes cannot tell: a layer of the model has moved, or parameters have changed groups."""

    def layers(order: list[str], prefix: str = "") -> list[tuple[str, nn.Parameter]]:
        model = nn.ModuleDict({name: nn.Linear(6, 6) for name in order})
        return [(prefix + name, p) for name, p in model.named_parameters()]

    saved = make(layers(["a", "b"])).state_dict()
    moved = make(layers(["b", "a"]))
    with pytest.raises(
        ValueError, match=r"another order, 'a.weight' where .* has 'b.weight'; pass"
    ):
        moved.load_state_dict(saved)
    assert moved.param_groups[0]["param_names"][0] == "b.weight"
    make(layers(["a", "b"], "module.")).load_state_dict(saved)

    def two_groups(first: tuple[int, ...]) -> list[dict[str, Any]]:
        named = layers(["a", "b"])
        rest = [i for i in range(4) if i not in first]
        return [{"params": [named[i] for i in part]} for part in (first, rest)]

    saved = make(two_groups((0, 1))).state_dict()
    with pytest.raises(ValueError, match=r"another order, 'a.bias' where .* has 'b.weight'"):
        make(two_groups((0, 2))).load_state_dict(saved)


def test_numbers_too_large_for_the_dtype_of_the_state_are_refused():
    model = mlp(dtype=torch.float64)
    optimizer = torchium.Shampoo(model.parameters())
    run(model, optimizer)
    state_dict = optimizer.state_dict()
    state_dict["state"][0]["statistics.0"][0, 0, 0] = 1e200
    with pytest.raises(ValueError, match=r"'statistics.0' of parameter 0 .*not finite"):
        torchium.Shampoo(mlp().parameters()).load_state_dict(state_dict)
    optimizer.load_state_dict(state_dict)
