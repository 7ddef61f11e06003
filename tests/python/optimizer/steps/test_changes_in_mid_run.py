"""Changes between two steps: they work, or raise an error that names the change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchium
from optimizer_cases import (
    ALL_CASES,
    CAPTURING_CASES,
    COUNTS,
    all_cases,
    assert_goes_on_as_a_copy,
    assert_same,
    backward,
    computed_state,
    give_gradients,
    ignore_fallback,
    mlp,
    plain_cases,
    run,
    set_gradients,
    snapshot,
    state_in_own_dtype,
    trained,
    values,
)
from torch import nn

pytestmark = ignore_fallback


# ---- the dtype and the device of the model


@all_cases
@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")], ids=str)
def test_state_follows_the_model_to_another_dtype(make, dtypes, device):
    """As for a checkpoint loaded into an optimizer of the other dtype."""
    before, after = (getattr(torch, name) for name in dtypes)
    model = mlp(device, before)
    optimizer = make(model.parameters())
    run(model, optimizer)
    other = mlp(device, after)
    other.load_state_dict(model.state_dict())
    other_optimizer = make(other.parameters())
    other_optimizer.load_state_dict(optimizer.state_dict())
    model.to(after)
    expected = run(other, other_optimizer, 4, 4)
    assert_same(run(model, optimizer, 4, 4), expected)
    for p in model.parameters():
        for key, tensor in state_in_own_dtype(optimizer, p):
            if tensor.is_floating_point() and key not in COUNTS:
                assert tensor.dtype == after, key


@all_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_stays_float32_when_the_model_becomes_16_bit(make, dtype):
    model, optimizer = trained(make)
    model.to(dtype)
    run(model, optimizer, 4, 3)
    optimizer.check_errors()
    for p in model.parameters():
        assert optimizer.state[p]["step"] == 7
        assert all(t.dtype != dtype for _, t in state_in_own_dtype(optimizer, p))


@pytest.mark.cuda
@all_cases
def test_state_follows_the_model_to_a_gpu_and_back(make):
    model, optimizer = trained(make)
    for step, device in enumerate(("cuda", "cpu", "cuda")):
        model.to(device)
        run(model, optimizer, 4 + 2 * step, 2)
        optimizer.check_errors()
    for p in model.parameters():
        assert optimizer.state[p]["step"] == 10
        assert all(t.is_cuda for t in computed_state(optimizer.state[p]).values())


# ---- the parameters


def clear_state(model, optimizer):
    optimizer.state.clear()


def empty_state_of_one(model, optimizer):
    optimizer.state[model[3].weight] = {}


def delete_averages(model, optimizer):
    for p in model.parameters():
        for key in ("exp_avg", "grafting_second_moment", "momentum_buffer"):
            optimizer.state[p].pop(key, None)


def more_state_of_other_code(model, optimizer):
    for p in model.parameters():
        optimizer.state[p]["slow"] = p.detach().clone()
    optimizer.state["steps"] = 4


HARMLESS = [
    clear_state,
    empty_state_of_one,
    delete_averages,
    more_state_of_other_code,
]


@all_cases
@pytest.mark.parametrize("change", HARMLESS)
def test_changes_that_a_step_takes(make, change, device):
    model = mlp(device)
    optimizer = make(model.parameters())
    run(model, optimizer, 0, 3)
    change(model, optimizer)
    assert_goes_on_as_a_copy(model, optimizer, steps=6)
    optimizer.check_errors()
    assert all(bool(v.isfinite().all()) for v in values(model))
    assert optimizer.state[model[0].weight]["step"] == (6 if change is clear_state else 9)


@all_cases
def test_a_parameter_of_a_dtype_that_no_step_takes_is_refused_by_name(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    run(model, optimizer)
    give_gradients(model, optimizer, 4)
    norm = model[1].weight
    old, norm.data = norm.data, norm.data.to(torch.float8_e4m3fn)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"'1.weight'.*float8_e4m3fn; only real floating-point"):
        optimizer.step()
    assert_same(optimizer.state_dict(), state)
    norm.data = old
    run(model, optimizer, 4, 2)


@all_cases
def test_a_parameter_of_another_shape_is_refused_with_both_shapes(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    run(model, optimizer)
    norm = model[1].weight
    old, norm.data = norm.data, torch.ones(7)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = snapshot(optimizer)
    uses_shape = len(computed_state(optimizer.state[norm])) > 1 or isinstance(
        optimizer, torchium.NaturalGradient
    )
    if not uses_shape:
        pytest.skip("keeps nothing of that shape")
    with pytest.raises(ValueError, match=r"'1.weight'.*(\[5\]|\[7\])"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    norm.data = old
    run(model, optimizer, 4, 2)


@pytest.mark.parametrize("name", [n for n in CAPTURING_CASES if "kfac" in n])
def test_a_layer_of_another_shape_is_refused_with_its_factors(name):
    model = mlp()
    optimizer = CAPTURING_CASES[name](model.named_parameters())
    run(model, optimizer)
    last = model[3]
    old, last.weight.data = last.weight.data, torch.ones(4, 5)
    last.bias.data = torch.ones(4)
    optimizer.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"'3.(weight|bias)' of group 0.*another shape since its"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    last.weight.data, last.bias.data = old, torch.ones(3)
    run(model, optimizer, 4, 2)


# ---- options

REFUSED_OPTIONS = {
    "block_size": ("shampoo_all_buffers", {"block_size": 2}, "block_size from 4 to 2"),
    "preconditioner_1d": (
        "shampoo",
        {"preconditioner_1d": "full"},
        "preconditioner_1d from 'diagonal' to 'full'",
    ),
    "preconditioner_1d back": (
        "shampoo_all_buffers",
        {"preconditioner_1d": "diagonal"},
        "preconditioner_1d from 'full' to 'diagonal'",
    ),
    "full_matrix": ("adagrad", {"full_matrix": True}, "full_matrix from False to True"),
    "full_matrix back": ("adagrad_full", {"full_matrix": False}, "full_matrix from True to False"),
    "block_size of Adagrad": ("adagrad_full", {"block_size": 3}, "block_size from 8 to 3"),
}


@pytest.mark.parametrize("change", REFUSED_OPTIONS)
@pytest.mark.parametrize("resumed", [False, True])
def test_options_that_the_state_cannot_follow_are_refused_by_name(change, resumed):
    name, options, message = REFUSED_OPTIONS[change]
    model = mlp()
    optimizer = ALL_CASES[name](
        [
            {"params": list(model[0].parameters())},
            {"params": list(model[3].parameters())},
        ]
    )
    run(model, optimizer)
    if resumed:
        model, optimizer = copy.deepcopy((model, optimizer))
    group = optimizer.param_groups[1]
    good = dict(group)
    group.update(options)
    set_gradients(model.parameters(), 4)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message) as error:
        optimizer.step()
    assert "state_dict" not in str(error.value)
    assert_same(snapshot(optimizer), before)
    group.update(good)
    run(model, optimizer, 5, 2)
    group.update(options)
    for p in group["params"]:
        del optimizer.state[p]
    run(model, optimizer, 7, 3)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("merge_dims", False, "merge_dims from True to False"),
        ("target_order", 1, "target_order from None to 1"),
        ("target_order", 0, "target_order from None to 0"),
    ],
)
def test_merged_dimensions_cannot_change_under_the_state(option, value, message):
    param = nn.Parameter(torch.ones(3, 2, 2))
    optimizer = torchium.Shampoo([param], preconditioner_1d="full")
    set_gradients([param], 0)
    optimizer.step()
    optimizer.param_groups[0][option] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def test_a_target_that_merges_alike_may_come_to_the_state():
    param = nn.Parameter(torch.ones(3, 2, 2))
    optimizer = torchium.Shampoo([param])
    set_gradients([param], 0)
    optimizer.step()
    optimizer.param_groups[0]["target_order"] = 2
    optimizer.step()


def test_an_update_of_preconditioners_takes_and_refuses_the_same_changes():
    model = mlp()
    optimizer = torchium.Shampoo(model.named_parameters(), update_freq=100)
    run(model, optimizer)
    model.double()
    optimizer.update_preconditioners()
    assert optimizer.state[model[0].weight]["roots.0"].dtype == torch.float64
    optimizer.param_groups[0]["block_size"] = 2
    with pytest.raises(ValueError, match=r"'0.weight'.*block_size from 1024 to 2"):
        optimizer.update_preconditioners()


def test_a_lost_matrix_is_named():
    model = mlp()
    optimizer = torchium.Shampoo(model.named_parameters())
    run(model, optimizer)
    del optimizer.state[model[3].weight]["roots.1"]
    set_gradients(model.parameters(), 4)
    with pytest.raises(ValueError, match=r"state of parameter '3.weight'.*has lost 'roots.1'.*del"):
        optimizer.step()


KFAC = [n for n in CAPTURING_CASES if "kfac" in n]


@pytest.mark.parametrize("name", KFAC)
def test_a_lost_factor_is_named(name):
    model = mlp()
    optimizer = CAPTURING_CASES[name](model.named_parameters())
    run(model, optimizer)
    key = "C" if "inverse_free" in name else "G"
    del optimizer.state[model[3].weight][key]
    give_gradients(model, optimizer, 4)
    with pytest.raises(ValueError, match=rf"'3.weight'.*has lost '{key}'"):
        optimizer.step()


@pytest.mark.parametrize("first", ["pi", "plain", "exact"])
@pytest.mark.parametrize("second", ["pi", "plain", "exact"])
@pytest.mark.parametrize("how", ["set", "delete"])
def test_damping_split_may_change_and_lost_inverses_come_back(first, second, how):
    """The factors stay; the next step recomputes what depends on them."""
    model = mlp()
    optimizer = torchium.KFAC(model, TCov=1, TInv=100, damping_split=first, kl_clip=None)
    run(model, optimizer)
    factors = optimizer.state[model[0].weight]["A"].clone()
    optimizer.param_groups[0]["damping_split"] = second
    if how == "delete":
        for p in model.parameters():
            for key in [k for k in optimizer.state[p] if k.startswith(("A_", "G_"))]:
                del optimizer.state[p][key]
    run(model, optimizer, 4, 1)
    state = optimizer.state[model[0].weight]
    assert state["factor_updates"] == 5
    assert not torch.equal(state["A"], factors)
    keys = {key for key in state if key.startswith(("A_", "G_"))}
    inverses = {"A_inverse", "G_inverse"}
    assert (keys == inverses) == (second != "exact")
    if first != second or how == "delete":
        root = state["A_inverse"] if second != "exact" else state["A_eigenvectors"]
        assert not torch.equal(root[0], torch.eye(root.shape[-1]))
    optimizer.check_errors()


@pytest.mark.parametrize("first", ["pi", "plain", "exact"])
@pytest.mark.parametrize("second", ["pi", "plain", "exact"])
def test_a_change_of_damping_split_leaves_no_step_and_no_checkpoint_without_inverses(
    first, second, device
):
    """The next step computes them, even if it is skipped; a checkpoint may be saved before it."""
    model = mlp(device)
    optimizer = torchium.KFAC(model, TCov=2, TInv=100, damping_split=first)
    run(model, optimizer, 0, 2)
    optimizer.param_groups[0]["damping_split"] = second
    resumed = torchium.KFAC(model)
    resumed.load_state_dict(optimizer.state_dict())
    assert_same(resumed.state_dict(), optimizer.state_dict())
    backward(model, 2)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    state = optimizer.state[model[0].weight]
    root = state["A_inverse" if second != "exact" else "A_eigenvectors"]
    assert not torch.equal(root[0].cpu(), torch.eye(root.shape[-1]))
    resumed.load_state_dict(optimizer.state_dict())
    assert_same(resumed.state_dict(), optimizer.state_dict())
    run(model, resumed, 3, 1)


OPTIONS_IN_MID_RUN: dict[str, list[dict[str, Any]]] = {
    "shampoo": [
        {"betas": (0.9, 1.0)},
        {"betas": (0.9, 0.9)},
        {"momentum": 0.9, "nesterov": True},
        *({"grafting": g} for g in ("sgd", "adagrad", "rmsprop", "adam")),
        {"root_dtype": "bfloat16"},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"exponent": -0.5, "relative_eps": 1e-3, "eps": 1e-6, "update_freq": 1},
        {"start_preconditioning_step": 9, "maximize": True},
        {"capturable": True},
    ],
    "shampoo_all_buffers": [
        {"betas": (0.0, 1.0)},
        {"grafting": None},
        {"momentum": 0.0, "nesterov": False},
    ],
    "adagrad": [{"lr_decay": 0.5, "eps": 1e-3, "maximize": True}, {"block_size": 3}],
    "adagrad_full": [{"update_freq": 5, "eps": 1e-3}],
    "kfac": [{"momentum": 0.0}, {"TCov": 1, "TInv": 1}, {"stat_decay": 0.5, "kl_clip": 1e-3}],
    "kfac_exact": [{"momentum": 0.9, "weight_decay": 0.1}, {"batch_averaged": False}],
    "natural_gradient": [
        {"momentum": 0.0},
        {"update_freq": 2},
        {"solver": "cg"},
        {"max_norm": 0.1},
    ],
    "natural_gradient_between": [{"momentum": 0.9}, {"update_freq": 1}, {"solver": "cg"}],
}


@all_cases
def test_integers_take_the_place_of_equal_floats(make):
    """0 equals 0.0, so a step keeps it in the group; the next plan and checkpoints take it too."""
    model = mlp()
    expected = copy.deepcopy(model)
    optimizer, other = make(model.parameters()), make(expected.parameters())
    for each, optimizer_of_it in ((model, optimizer), (expected, other)):
        run(each, optimizer_of_it)
        if each is model:
            for name, value in optimizer.param_groups[0].items():
                if isinstance(value, float) and value.is_integer():
                    optimizer.param_groups[0][name] = int(value)
        run(each, optimizer_of_it, 4, 1)
        added = nn.Linear(3, 3)
        nn.init.eye_(added.weight)
        nn.init.zeros_(added.bias)
        optimizer_of_it.add_param_group({"params": added.parameters()})
        each.append(added)
        run(each, optimizer_of_it, 5, 2)
        optimizer_of_it.load_state_dict(optimizer_of_it.state_dict())
        run(each, optimizer_of_it, 7, 2)
    assert_same(values(model), values(expected))


@pytest.mark.parametrize(
    ("name", "options"),
    [(n, o) for n, all_of in OPTIONS_IN_MID_RUN.items() for o in all_of],
    ids=str,
)
def test_options_that_may_change(name, options, device):
    model = mlp(device)
    optimizer = ALL_CASES[name](model.parameters())
    run(model, optimizer)
    optimizer.param_groups[0].update(options)
    assert_goes_on_as_a_copy(model, optimizer, steps=5)
    optimizer.check_errors()
    assert all(bool(v.isfinite().all()) for v in values(model))
    assert optimizer.state[model[0].weight]["step"] == 9


def loaded(optimizer: Any, model: nn.Module) -> Any:
    other = type(optimizer)(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    return other


@pytest.mark.parametrize("how", ["load", "copy", "pickle"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (ALL_CASES["shampoo_all_buffers"], {"grafting": "adagrad"}),
        (ALL_CASES["shampoo_unpreconditioned"], {"grafting": "adagrad"}),
        (ALL_CASES["kfac"], {"damping_split": "plain"}),
    ],
)
def test_options_that_change_right_after_a_load_change_as_in_the_run(make, options, how):
    """What the state cannot follow begins afresh in both."""
    model, optimizer = trained(make)
    if how == "load":
        resumed_model = copy.deepcopy(model)
        resumed = loaded(optimizer, resumed_model)
    elif how == "copy":
        resumed_model, resumed = copy.deepcopy((model, optimizer))
    else:
        resumed_model, resumed = pickle.loads(pickle.dumps((model, optimizer)))
    for each in (optimizer, resumed):
        each.param_groups[0].update(options)
    assert_same(run(resumed_model, resumed, 4, 3), run(model, optimizer, 4, 3))


# ---- averages that start late


def step_length(params: list[nn.Parameter], step: Callable[[], None]) -> list[float]:
    before = [p.detach().clone() for p in params]
    step()
    return [(p.detach() - b).norm().item() for p, b in zip(params, before, strict=True)]


def late_problem(device, **options: Any) -> tuple[list[nn.Parameter], torchium.Shampoo]:
    params = [nn.Parameter(torch.ones(s, device=device)) for s in ((6, 4), (5,), (2, 3, 2, 2))]
    optimizer = torchium.Shampoo(params, lr=1e-3, **options)
    for t in range(1000):
        if t % 100 == 0:
            set_gradients(params, t)
        optimizer.step()
    return params, optimizer


LATE = {
    "second moment": {"grafting": "adam"},
    "average": {"betas": (0.9, 1.0)},
    "both": {"grafting": "adam", "betas": (0.9, 0.99)},
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("how", ["option", "checkpoint"])
def test_steps_have_the_right_length_when_an_average_starts_late(late, how, device):
    options = LATE[late]
    if how == "option":
        params, optimizer = late_problem(device, grafting="sgd")
        optimizer.param_groups[0].update(options)
    else:
        params, first = late_problem(device, **{"grafting": "sgd", **options})
        state_dict = first.state_dict()
        for state in state_dict["state"].values():
            state.pop("exp_avg", None)
            state.pop("grafting_second_moment", None)
        optimizer = torchium.Shampoo(params)
        optimizer.load_state_dict(state_dict)
    set_gradients(params, 5000)
    expected = [
        1e-3 * (p.numel() ** 0.5 if "grafting" in options else p.grad.norm().item()) for p in params
    ]
    for _ in range(3):  # equal gradients: they equal their averages
        assert step_length(params, optimizer.step) == pytest.approx(expected, rel=1e-3)
    state = optimizer.state[params[0]]
    if late != "average":
        assert state["grafting_second_moment_start"] == 1000
    if late != "second moment":
        assert state["exp_avg_start"] == 1000
    resumed = torchium.Shampoo(params)
    resumed.load_state_dict(optimizer.state_dict())
    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert step_length(params, resumed.step) == pytest.approx(expected, rel=1e-3)
    for p in params:  # their state is laid out again
        gradient, p.grad = p.grad.double(), None
        p.data, p.grad = p.data.double(), gradient
    assert step_length(params, resumed.step) == pytest.approx(expected, rel=1e-3)


def test_an_average_that_starts_in_a_skipped_step_starts_with_the_next(device):
    params, optimizer = late_problem(device, grafting="sgd")
    optimizer.param_groups[0]["grafting"] = "adam"
    set_gradients(params, 5000)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    set_gradients(params, 5000)
    expected = [1e-3 * p.numel() ** 0.5 for p in params]
    assert step_length(params, optimizer.step) == pytest.approx(expected, rel=1e-3)


def test_an_average_that_paused_starts_afresh(device):
    params, optimizer = late_problem(device, grafting="adam", betas=(0.9, 0.99))
    (group,) = optimizer.param_groups
    group.update(grafting="sgd", betas=(0.0, 0.99))
    optimizer.step()
    assert not any("exp_avg" in key or "second" in key for key in optimizer.state[params[0]])
    group.update(grafting="adam", betas=(0.9, 0.99))
    set_gradients(params, 5000)
    expected = [1e-3 * p.numel() ** 0.5 for p in params]
    assert step_length(params, optimizer.step) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("before", "after"), [("adam", "adagrad"), ("adagrad", "rmsprop")])
def test_a_second_moment_of_another_kind_starts_afresh(before, after, device):
    params, optimizer = late_problem(device, grafting=before, betas=(0.0, 0.99))
    optimizer.param_groups[0]["grafting"] = after
    set_gradients(params, 5000)
    share = 1.0 if after == "adagrad" else 0.01**0.5  # of |g| in the root of the moment
    expected = [1e-3 / share * p.numel() ** 0.5 for p in params]
    assert step_length(params, optimizer.step) == pytest.approx(expected, rel=1e-3)
    assert optimizer.state[params[0]]["grafting_second_moment_start"] == 1000


@pytest.mark.parametrize("how", ["load", "copy", "pickle", "resume"])
@pytest.mark.parametrize(("before", "after"), [("adam", "adagrad"), ("adagrad", "rmsprop")])
def test_a_second_moment_of_another_kind_starts_afresh_in_checkpoints_too(before, after, how):
    """It does not tell of what kind it is."""
    model = mlp()
    optimizer = torchium.Shampoo(model.named_parameters(), grafting=before)
    run(model, optimizer)
    if how == "resume":  # the change comes after a checkpoint, before a step
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["grafting"] = after
    if how in ("load", "resume"):
        resumed_model = copy.deepcopy(model)
        resumed = loaded(optimizer, resumed_model)
    else:
        pair = (model, optimizer)
        resumed_model, resumed = (
            copy.deepcopy(pair) if how == "copy" else pickle.loads(pickle.dumps(pair))
        )
    assert optimizer.state[model[0].weight]["grafting_second_moment_start"] == 0
    assert_same(run(resumed_model, resumed, 4, 3), run(model, optimizer, 4, 3))
    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert optimizer.state[model[0].weight]["grafting_second_moment_start"] == 4


@plain_cases
def test_averages_keep_that_they_began_with_the_first_step(make):
    """Their keys are then those of averages that began later."""
    _model, optimizer = trained(make)
    for state in optimizer.state.values():
        for average in {"exp_avg", "grafting_second_moment"} & state.keys():
            assert state[f"{average}_start"] == 0


@pytest.mark.parametrize("flatten", [False, True])
def test_a_distributed_checkpoint_keeps_the_start_of_averages(flatten, tmp_path):
    """It loads what is in the state dict of a new optimizer, whose averages begin with the first step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    split = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = mlp()
    optimizer = torchium.Shampoo(model.parameters(), grafting="sgd")
    run(model, optimizer)
    late = {"grafting": "adam", "betas": (0.9, 0.99)}
    optimizer.param_groups[0].update(late)
    run(model, optimizer, 4, 1)
    saved = get_optimizer_state_dict(model, optimizer, options=split)
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)
    resumed_model = copy.deepcopy(model)
    resumed_model.zero_grad()
    resumed = torchium.Shampoo(resumed_model.parameters(), **late)
    state = get_optimizer_state_dict(resumed_model, resumed, options=split)
    dcp.load({"optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(resumed_model, resumed, state, options=split)
    assert_same(run(resumed_model, resumed, 5, 3), run(model, optimizer, 5, 3))
    assert_same(resumed.state_dict(), optimizer.state_dict())
