"""The C++ optimizers and the Python ones are the same, bit for bit on the CPU."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torchium
from parity_tools import assert_same, make, set_lr, state_of
from torch import nn
from trajectory_cases import ALL_SHAPES, BASE, CASES, OPTIONS, OTHER_PROBLEMS
from trajectory_problems import train

pytest.importorskip("torchium_cpp._C", exc_type=ImportError)

# Those that take any gradients; for the others see test_parity_capturing.py.
OPTIMIZERS = ("Shampoo", "Adagrad")
STEPS = 14  # the late parameters of `intermittent` come in at the 10th


def run(language: str, name: str, problem: str, dtype: torch.dtype, **options: Any):
    """The trajectory, and the state of every parameter at its end."""
    made = []

    def make_optimizer(params):
        made.append((make(language, name, params, **options), params))
        return made[0][0]

    maximize = options.get("maximize", False)
    history = train(problem, dtype, make_optimizer, maximize=maximize, steps=STEPS)
    optimizer, params = made[0]
    return history, [state_of(optimizer, p) for p in params]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "KFAC", "NaturalGradient"])
def test_options_have_the_same_names_and_defaults(name):
    signature = inspect.signature(getattr(torchium, name).__init__).parameters
    only_python = ("self", "params", "params_or_model", "grad_scaler")  # libtorch has no scaler
    # No part of a checkpoint.
    of_ranks = ("process_group", "comm_dtype", "bucket_bytes", "grad_worker_fraction")
    not_saved = (*only_python, *of_ranks, "skip_layers")
    python = {k: p.default for k, p in signature.items() if k not in not_saved}
    cpp = make("cpp", name, [nn.Parameter(torch.zeros(2))]).options()
    names, *_ = torch.ops.torchium.option_fields(name)
    defaults = torch.ops.torchium.default_options(name)
    listed = dict(zip(defaults[::2], defaults[1::2], strict=True))
    assert list(python) == list(cpp) == list(listed) == names
    for key, default in python.items():
        assert cpp[key] == listed[key] == default, key
        assert type(cpp[key]) is type(listed[key]) is type(default), key


# Every option on all shapes; a few cases on the gradients of networks.
OF_ALL_SHAPES = [(name, case, ALL_SHAPES) for name, case in CASES]
OF_OTHERS = [
    (name, case, problem)
    for name, case in (("Shampoo", "base"), ("Shampoo", "everything"), ("Adagrad", "full_options"))
    for problem in OTHER_PROBLEMS
]


@pytest.mark.parametrize(("name", "case", "problem"), OF_ALL_SHAPES + OF_OTHERS)
def test_trajectory_and_state(name, case, problem):
    options = OPTIONS[name][case]
    python_history, python_state = run("python", name, problem, torch.float32, **options)
    cpp_history, cpp_state = run("cpp", name, problem, torch.float32, **options)
    assert_same(python_history, cpp_history)
    assert [sorted(s) for s in python_state] == [sorted(s) for s in cpp_state]
    assert_same(python_state, cpp_state)


@pytest.mark.parametrize("case", ["everything", "newton", "exponent_no_root"])
def test_float64(case):
    options = OPTIONS["Shampoo"][case]
    assert_same(
        run("python", "Shampoo", "odd_shapes", torch.float64, **options),
        run("cpp", "Shampoo", "odd_shapes", torch.float64, **options),
    )


def twin_parameters(dtype: torch.dtype = torch.float32) -> dict[str, list[nn.Parameter]]:
    rng = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=rng).to(dtype) for shape in ((9, 6), (7,), (3, 2, 3, 3))]
    return {language: [nn.Parameter(v.clone()) for v in values] for language in ("python", "cpp")}


def feed(twins: dict[str, list[nn.Parameter]], step: int, poison: int | None = None) -> None:
    """The same gradients for both; the one of parameter `poison` with a NaN."""
    for params in twins.values():
        rng = torch.Generator().manual_seed(step)
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)
            if i == poison:
                p.grad.view(-1)[-1] = math.nan


def assert_same_state(twins, optimizers) -> None:
    for p, q in zip(twins["python"], twins["cpp"], strict=True):
        assert_same(p, q)
        assert_same(state_of(optimizers["python"], p), state_of(optimizers["cpp"], q))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters(dtype):
    twins = twin_parameters(dtype)
    options = {**BASE, "grafting": "adam", "momentum": 0.9, "betas": (0.9, 0.95)}
    optimizers = {k: make(k, "Shampoo", p, **options) for k, p in twins.items()}
    for step in range(10):
        feed(twins, step)
        for optimizer in optimizers.values():
            optimizer.step()
    assert_same_state(twins, optimizers)
    assert state_of(optimizers["cpp"], twins["cpp"][0])["statistics.0"].dtype == torch.float32


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_schedules_and_late_groups(name):
    twins = twin_parameters()
    optimizers = {
        k: make(k, name, [{"params": p[:1]}, {"params": p[1:2], "weight_decay": 0.1}], eps=1e-2)
        for k, p in twins.items()
    }
    for step in range(12):
        feed(twins, step)
        for language, optimizer in optimizers.items():
            set_lr(optimizer, 0.1 / (1 + step))
            if step == 5:
                optimizer.add_param_group({"params": twins[language][2:], "eps": 1e-3})
            optimizer.step()
    assert_same_state(twins, optimizers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps(name):
    """Both skip the same steps, leave the same state and raise the same error at the third in a row."""
    twins = twin_parameters()
    optimizers = {k: make(k, name, p, lr=0.1, eps=1e-2) for k, p in twins.items()}
    for step, poison in enumerate([None, 1, None, 0, 2]):
        feed(twins, step, poison)
        for optimizer in optimizers.values():
            optimizer.step()
        assert_same_state(twins, optimizers)
    assert state_of(optimizers["cpp"], twins["cpp"][0])["step"] == 2
    feed(twins, 9, poison=1)
    messages = {}
    for language, optimizer in optimizers.items():
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        messages[language] = str(error.value)
    assert messages["python"] == f"{name}: {messages['cpp']}"
    assert "parameter 1 of group 0 (shape [7])" in messages["cpp"]
    assert_same_state(twins, optimizers)


@pytest.mark.parametrize("full_matrix", [False, True])
def test_a_cpp_archive_goes_on_like_an_uninterrupted_python_run(full_matrix):
    twins = twin_parameters()
    options = dict(lr=0.1, full_matrix=full_matrix, block_size=8, eps=1e-2)
    optimizers = {k: make(k, "Adagrad", p, **options) for k, p in twins.items()}
    for step in range(10):
        feed(twins, step)
        if step == 5:
            archive = optimizers["cpp"].save_bytes()
            optimizers["cpp"] = make("cpp", "Adagrad", twins["cpp"], **options)
            optimizers["cpp"].load_bytes(archive)
        for optimizer in optimizers.values():
            optimizer.step()
    assert_same_state(twins, optimizers)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Shampoo", {"lr": -1.0}),
        ("Shampoo", {"eps": -1.0}),
        ("Shampoo", {"update_freq": 0}),
        ("Shampoo", {"weight_decay": -0.1}),
        ("Shampoo", {"betas": (1.0, 1.0)}),
        ("Shampoo", {"betas": (0.0, 1.1)}),
        ("Shampoo", {"momentum": 1.0}),
        ("Shampoo", {"nesterov": True}),
        ("Shampoo", {"relative_eps": -1.0}),
        ("Shampoo", {"block_size": 0}),
        ("Shampoo", {"preconditioner_1d": "none"}),
        ("Shampoo", {"max_preconditioned_dim": 0}),
        ("Shampoo", {"grafting": "lion"}),
        ("Shampoo", {"grafting_eps": -1.0}),
        ("Shampoo", {"grafting_beta2": 1.5}),
        ("Shampoo", {"start_preconditioning_step": 0}),
        ("Shampoo", {"root_method": "svd"}),
        ("Shampoo", {"max_root_failures": 0}),
        ("Adagrad", {"lr": -1.0}),
        ("Adagrad", {"lr_decay": -1.0}),
        ("Adagrad", {"weight_decay": -1.0}),
        ("Adagrad", {"initial_accumulator_value": -1.0}),
        ("Adagrad", {"eps": -1.0}),
        ("Adagrad", {"block_size": 0}),
        ("Adagrad", {"update_freq": 0}),
        ("KFAC", {"lr": -1.0}),
        ("KFAC", {"momentum": 1.0}),
        ("KFAC", {"weight_decay": -0.1}),
        ("KFAC", {"damping": -1.0}),
        ("KFAC", {"TCov": 0}),
        ("KFAC", {"TInv": 0}),
        ("KFAC", {"eps": -1.0}),
        ("KFAC", {"stat_decay": 1.1}),
        ("KFAC", {"kl_clip": 0.0}),
        ("KFAC", {"damping_split": "half"}),
        ("KFAC", {"max_factor_size": 0}),
        ("NaturalGradient", {"lr": -1.0}),
        ("NaturalGradient", {"damping": 0.0}),
        ("NaturalGradient", {"update_freq": 0}),
        ("NaturalGradient", {"eps": 0.0}),
        ("NaturalGradient", {"momentum": 1.0}),
        ("NaturalGradient", {"max_norm": 0.0}),
        ("NaturalGradient", {"solver": "lu"}),
    ],
)
def test_both_refuse_the_same_options(name, options):
    (option,) = options
    messages = []
    for language in ("python", "cpp"):
        with pytest.raises(ValueError, match=option) as error:
            make(language, name, [nn.Parameter(torch.zeros(2, 2))], **options)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
