"""PyTorch's tests for its own optimizers, applied to ours.

The cases are ``OptimizerInfo`` entries, as PyTorch's are. K-FAC and natural gradient take part if a list of
parameters suffices.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torchium
from optimizer_cases import assert_same, ignore_fallback, through_a_file, values
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
)

pytestmark = ignore_fallback
# That import prevents later tests of the process from setting backend flags.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True


def _inputs(cases: dict[str, dict[str, Any]]) -> Callable[..., list[OptimizerInput]]:
    """Fresh options for each call, because a test may change them."""

    def make(device: Any, dtype: Any = None) -> list[OptimizerInput]:
        return [OptimizerInput(None, deepcopy(kwargs), desc) for desc, kwargs in cases.items()]

    return make


def _errors(cases: list[tuple[dict[str, Any], str]]) -> Callable[..., list[ErrorOptimizerInput]]:
    def make(device: Any, dtype: Any) -> list[ErrorOptimizerInput]:
        return [
            ErrorOptimizerInput(
                OptimizerInput([nn.Parameter(torch.randn(2, 3))], kwargs, str(kwargs)),
                error_on=OptimizerErrorEnum.CONSTRUCTION_ERROR,
                error_type=ValueError,
                error_regex=message,
            )
            for kwargs, message in cases
        ]

    return make


COMMON: dict[str, dict[str, Any]] = {
    "default": {},
    "lr": {"lr": 1e-2},
    "tensor lr": {"lr": torch.tensor(1e-2)},
    "weight_decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}
COMMON_ERRORS = [
    ({"lr": -1e-2}, "lr must be"),
    ({"lr": torch.tensor([1e-3, 1e-2])}, "lr as a tensor"),
    ({"weight_decay": -1.0}, "weight_decay must be"),
]


def _info(
    cls: Any, cases: dict[str, dict[str, Any]], errors: list[tuple[dict[str, Any], str]]
) -> OptimizerInfo:
    return OptimizerInfo(
        cls,
        optim_inputs_func=_inputs(cases),
        optim_error_inputs_func=_errors(errors),
        supported_impls=(),
        not_og_supported_flags=("maximize", "capturable"),
        supports_complex=False,
    )


SHAMPOO = {
    "momentum": {"momentum": 0.9, "nesterov": True},
    "grafting": {"grafting": "adam", "betas": (0.9, 0.99)},
    "blocks": {"block_size": 3, "preconditioner_1d": "full", "update_freq": 3},
    "capturable": {"capturable": True},
}
INFOS = {
    "shampoo": _info(
        torchium.Shampoo,
        COMMON | SHAMPOO,
        [*COMMON_ERRORS, ({"betas": (1.0, 0.9)}, r"betas\[0\]"), ({"nesterov": True}, "momentum")],
    ),
    "from_adamw": _info(
        torchium.ShampooW,
        COMMON | {"ignored": {"foreach": True, "fused": False}},
        [*COMMON_ERRORS, ({"amsgrad": True}, "amsgrad"), ({"differentiable": True}, "gradient")],
    ),
    "adagrad": _info(
        torchium.Adagrad,
        COMMON | {"lr_decay": {"lr_decay": 0.1, "initial_accumulator_value": 0.1}},
        [*COMMON_ERRORS, ({"lr_decay": -0.5}, "lr_decay must be")],
    ),
    "adagrad_full": _info(
        torchium.Adagrad,
        {f"full {name}": {"full_matrix": True, **kwargs} for name, kwargs in COMMON.items()},
        [({"full_matrix": True, "block_size": 0}, "block_size must be")],
    ),
    "kfac": _info(
        torchium.KFAC,
        COMMON | {"exact": {"damping_split": "exact", "TCov": 1, "TInv": 2}},
        [*COMMON_ERRORS, ({"damping": -1.0}, "damping must be")],
    ),
    "natural_gradient": _info(
        torchium.NaturalGradient,
        {name: kwargs for name, kwargs in COMMON.items() if "weight_decay" not in kwargs}
        | {"momentum": {"momentum": 0.5}, "between": {"update_freq": 3}},
        [*COMMON_ERRORS[:2], ({"damping": 0.0}, "damping must be")],
    ),
}
PLAIN = [name for name in INFOS if name != "natural_gradient"]


def cases(names: list[str]) -> list[Any]:
    return [
        pytest.param(INFOS[name].optim_cls, case.kwargs, id=f"{name}-{case.desc}")
        for name in names
        for case in INFOS[name].optim_inputs_func(device="cpu")
    ]


EVERY = cases(list(INFOS))
every_optimizer = pytest.mark.parametrize(("cls", "kwargs"), EVERY)
# With gradients from no layer.
plain_optimizers = pytest.mark.parametrize(("cls", "kwargs"), cases(PLAIN))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def linear(contiguous: bool = True) -> tuple[nn.Linear, Callable[[], Tensor]]:
    """A layer, and its loss on one batch."""
    layer = nn.Linear(5, 10)
    if not contiguous:
        layer.weight = nn.Parameter(torch.randn(10, 5, 2)[..., 0])
        layer.bias = nn.Parameter(torch.randn(10, 2)[..., 0])
    inputs = torch.randn(4, 5)
    return layer, lambda: layer(inputs).square().sum(1).mean()


def train(optimizer: Any, loss: Callable[[], Tensor], steps: int, scheduler: Any = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(value.detach())
        elif scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("name", INFOS)
def test_errors(name):
    for error in INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32):
        case = error.optimizer_error_input
        with pytest.raises(error.error_type, match=error.error_regex):
            INFOS[name].optim_cls(case.params, **case.kwargs)


@every_optimizer
@pytest.mark.parametrize(("contiguous", "scheduled"), [(False, False), (True, True)])
def test_the_loss_goes_in_the_right_direction(cls, kwargs, contiguous, scheduled):
    layer, loss = linear(contiguous)
    first = loss().item()
    kwargs = deepcopy(kwargs)
    for schedulers in INFOS["shampoo"].scheduler_inputs if scheduled else [[None]]:
        optimizer = cls(layer.parameters(), **kwargs)
        for make in schedulers:
            train(optimizer, loss, 10, make(optimizer) if make else None)
    if kwargs.get("maximize"):
        assert loss().item() > first
    else:
        assert loss().item() < first


@plain_optimizers
def test_groups_have_their_own_lr_and_weight_decay(cls, kwargs):
    layer, loss = linear()
    irrelevant = nn.Parameter(torch.randn(2))
    kept = irrelevant.detach().clone()
    kwargs = deepcopy(kwargs)
    kwargs.setdefault("lr", 1e-3)
    decays = deepcopy(kwargs) | {"weight_decay": 0.0}
    optimizer = cls(
        [
            {"params": [layer.weight], **kwargs},
            {"params": [layer.bias], **decays},
            {**kwargs, "params": [irrelevant], "lr": 1e-28},
        ]
    )
    first = loss().item()
    irrelevant.grad = torch.rand_like(irrelevant)
    for _ in range(20):
        layer.zero_grad()
        loss().backward()
        optimizer.step()
    assert (loss().item() > first) == bool(kwargs.get("maximize"))
    torch.testing.assert_close(irrelevant.detach(), kept)


@every_optimizer
def test_steps_without_gradients_do_nothing(cls, kwargs):
    params = [torch.randn(2, 3) for _ in range(2)]
    before = [p.clone() for p in params]
    optimizer = cls(params, **deepcopy(kwargs))
    closure_value = torch.tensor([1.0])
    assert optimizer.step(lambda: closure_value) is closure_value
    assert_same(params, before)
    assert not optimizer.state


@plain_optimizers
def test_steps_with_zero_gradients_do_nothing(cls, kwargs):
    if kwargs.get("weight_decay") or cls is torchium.ShampooW:
        pytest.skip("the weights decay")
    params = [
        nn.Parameter(torch.randn(5, 1)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.empty(0, 3)),
    ]
    before = [p.detach().clone() for p in params]
    optimizer = cls(params, **deepcopy(kwargs))
    for p in params:
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        optimizer.step()
    assert_same([p.detach() for p in params], before)


@every_optimizer
def test_an_optimizer_can_be_printed(cls, kwargs):
    shown = repr(cls(linear()[0].parameters(), **deepcopy(kwargs)))
    assert "lr" in shown
    assert "Parameter Group 0" in shown


NAMED = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize(
    ("cls", "kwargs", "named"),
    [
        pytest.param(*case.values, NAMED[turn % len(NAMED)], id=case.id)
        for turn, case in enumerate(EVERY)
    ],
)
def test_state_dicts_are_deterministic_and_names_survive(cls, kwargs, named):
    layer, loss = linear()
    other = deepcopy(layer)

    def make(model, is_named):
        params = model.named_parameters() if is_named else model.parameters()
        return cls(params, **deepcopy(kwargs))

    optimizer = make(layer, named[0])
    train(optimizer, loss, 5)
    other.load_state_dict(layer.state_dict())
    other_optimizer = make(other, named[1])
    other_optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    inputs = torch.randn(4, 5)
    for _ in range(5):
        train(optimizer, lambda: layer(inputs).square().mean(), 1)
        train(other_optimizer, lambda: other(inputs).square().mean(), 1)
        assert_same(values(other), values(layer))
    states = [o.state_dict() for o in (optimizer, other_optimizer)]
    if any(named):
        assert states[1]["param_groups"][0]["param_names"] == ["weight", "bias"]
    for state in states:
        state["param_groups"][0].pop("param_names", None)
    assert_same(*states)
    other_optimizer.param_groups.extend(other_optimizer.param_groups)
    repeated = other_optimizer.state_dict()["param_groups"]
    assert repeated[0] == repeated[1]


@every_optimizer
def test_state_dicts_without_newer_options_load(cls, kwargs):
    model = nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.GroupNorm(1, 2))
    optimizer = cls(model.parameters(), **deepcopy(kwargs))
    images = torch.rand(2, 4, 8, 8)

    def loss():
        return model(images).square().flatten(1).sum(1).mean()

    train(optimizer, loss, 3)
    old = deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in INFOS["shampoo"].not_og_supported_flags:
            group.pop(flag, None)
    for state in old["state"].values():  # as PyTorch's were once
        state["step"] = state["step"].item()
    optimizer.load_state_dict(old)
    train(optimizer, loss, 2)


@every_optimizer
@pytest.mark.parametrize("weights_only", [True, False])
def test_state_dicts_pass_through_files(cls, kwargs, weights_only):
    layer, loss = linear()
    optimizer = cls(layer.parameters(), **deepcopy(kwargs))
    train(optimizer, loss, 3)
    state_dict = optimizer.state_dict()
    assert_same(through_a_file(state_dict, weights_only=weights_only), state_dict)


@every_optimizer
def test_hooks_of_state_dicts_run_in_order(cls, kwargs):
    optimizer = cls([torch.rand(2, 3, requires_grad=True)], **deepcopy(kwargs))

    def note(opt):
        opt.state["test"] = 1

    def without_note(opt, state_dict):
        return {**state_dict, "noted": state_dict["state"].pop("test", 0)}

    def lr_of(lr):
        def hook(opt, state_dict):
            state_dict = deepcopy(state_dict)
            state_dict["param_groups"][0]["lr"] = lr
            return state_dict

        return hook

    optimizer.register_state_dict_pre_hook(note)
    assert optimizer.state_dict()["state"] == {"test": 1}
    optimizer.register_state_dict_post_hook(without_note)
    state_dict = optimizer.state_dict()
    assert state_dict["noted"] == 1
    assert "test" not in state_dict["state"]

    optimizer.register_load_state_dict_pre_hook(lr_of(0.25))
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.register_load_state_dict_pre_hook(lr_of(0.5), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda opt: opt.state.update(loaded=True))
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.state["loaded"] is True


@every_optimizer
def test_state_of_no_parameter_is_saved_loaded_and_copied(cls, kwargs):
    layer, loss = linear()
    optimizer = cls(layer.parameters(), **deepcopy(kwargs))
    train(optimizer, loss, 2)
    optimizer.state["note"] = 3
    optimizer.state["tensor"] = torch.ones(2)
    state_dict = deepcopy(optimizer.state_dict())
    assert state_dict["state"]["note"] == 3
    (other_layer, copied) = deepcopy((layer, optimizer))
    assert_same(copied.state["tensor"], torch.ones(2))
    buffer = io.BytesIO()
    torch.save((other_layer, copied), buffer)
    loaded = cls(other_layer.parameters(), **deepcopy(kwargs))
    loaded.load_state_dict(state_dict)
    assert loaded.state["note"] == 3
    assert_same(loaded.state["tensor"], torch.ones(2))
    assert loaded.state["tensor"] is not state_dict["state"]["tensor"]
    train(optimizer, loss, 2)
    assert_same(optimizer.state["tensor"], torch.ones(2))


@every_optimizer
def test_global_and_local_hooks_run_around_a_step(cls, kwargs):
    optimizer = cls([torch.tensor([1.0, 1.0])], **deepcopy(kwargs))
    calls: list[str] = []

    def hook(name):
        return lambda opt, args, kwargs: calls.append(name)

    handles = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
    ]
    optimizer.step()
    assert calls == ["global pre", "pre", "post", "global post"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(calls) == 4


@every_optimizer
def test_copies_have_all_public_attributes_and_state_is_not_empty(cls, kwargs):
    layer, loss = linear()
    optimizer = cls(layer.parameters(), **deepcopy(kwargs))
    train(optimizer, loss, 3)

    def public(obj):
        return {key for key in vars(obj) if not key.startswith("_")}

    assert public(deepcopy(optimizer)) == public(optimizer)
    assert len(optimizer.state) == 2
    assert all(len(state) > 0 for state in optimizer.state.values())


@every_optimizer
def test_complex_parameters_are_refused_by_name(cls, kwargs):
    params = [("real", torch.randn(3, 2)), ("complex", torch.randn(3, dtype=torch.complex64))]
    with pytest.raises(ValueError, match=r"'complex'.*complex64"):
        cls(params, **deepcopy(kwargs))


@plain_optimizers
@pytest.mark.parametrize("key", ["foreach", "fused", "differentiable"])
def test_how_pytorch_runs_its_own_steps_is_no_option(cls, kwargs, key):
    if cls is torchium.ShampooW:
        pytest.skip("takes AdamW's options")
    with pytest.raises(TypeError, match=key):
        cls(linear()[0].parameters(), **{**deepcopy(kwargs), key: True})


@plain_optimizers
def test_one_group_holds_parameters_of_several_dtypes_and_empty_ones(cls, kwargs):
    params = [
        nn.Parameter(torch.rand(2, 3, dtype=dtype))
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    ]
    params += [
        nn.Parameter(torch.rand(())),
        nn.Parameter(torch.empty(0)),
        nn.Parameter(torch.empty(3, 0)),
    ]
    optimizer = cls(params, **deepcopy(kwargs))
    for step in range(7):
        for p in params:
            p.grad = None if step == 3 else torch.rand_like(p)
        optimizer.step()
    optimizer.check_errors()
    for p in params:
        assert bool(p.isfinite().all())
        assert optimizer.state[p]["step"] == 6
