"""50 steps of every optimizer and option agree with the float64 reference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torchium
from reference import ReferenceAdagrad, ReferenceShampoo
from trajectory_problems import PROBLEMS, train

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}

# Small blocks, so that few dimensions divide; damping that float32 roots can see.
BASE = dict(lr=0.02, eps=1e-2, update_freq=3, block_size=8)
SHAMPOO: dict[str, dict[str, Any]] = {
    "defaults": dict(update_freq=100, block_size=1024),
    "base": {},
    "update_freq_1": dict(update_freq=1),
    "update_freq_10": dict(update_freq=10),
    "block_size_3": dict(block_size=3),
    "block_size_2": dict(block_size=2),
    "ema": dict(betas=(0.9, 0.95)),
    "ema_of_gradients": dict(betas=(0.8, 1.0)),
    "momentum": dict(momentum=0.9),
    "nesterov": dict(momentum=0.8, nesterov=True),
    "weight_decay": dict(weight_decay=0.1),
    "decoupled_weight_decay": dict(weight_decay=0.1, decoupled_weight_decay=True),
    "maximize": dict(maximize=True, weight_decay=0.1),
    "relative_eps": dict(relative_eps=1e-2, eps=0.0, preconditioner_1d="full"),
    "no_merge": dict(merge_dims=False),
    "no_merge_one_block": dict(merge_dims=False, block_size=64),
    "exponent": dict(exponent=-0.5),
    "exponent_no_root": dict(exponent=-0.3),
    "full_1d": dict(preconditioner_1d="full"),
    "full_1d_ema": dict(preconditioner_1d="full", betas=(0.5, 0.9), block_size=4),
    "eigh": dict(root_method="eigh"),
    "newton": dict(root_method="newton"),
    "newton_full_1d": dict(root_method="newton", preconditioner_1d="full", merge_dims=False),
    "start": dict(start_preconditioning_step=6),
    "start_grafted": dict(
        start_preconditioning_step=8, grafting="adam", betas=(0.9, 0.9), momentum=0.5
    ),
    "grafting_sgd": dict(grafting="sgd"),
    "grafting_adagrad": dict(grafting="adagrad"),
    "grafting_rmsprop": dict(grafting="rmsprop", lr=1e-3),
    "grafting_adam": dict(grafting="adam"),
    "grafting_sgd_ema": dict(grafting="sgd", betas=(0.9, 0.95)),
    "grafting_adagrad_ema": dict(grafting="adagrad", betas=(0.9, 0.95), grafting_eps=1e-3),
    "grafting_rmsprop_ema": dict(grafting="rmsprop", betas=(0.9, 0.95), grafting_beta2=0.9),
    "grafting_adam_ema": dict(grafting="adam", betas=(0.9, 0.95), preconditioner_1d="full"),
    "everything": dict(
        betas=(0.9, 0.95), momentum=0.7, nesterov=True, weight_decay=0.05,
        decoupled_weight_decay=True, relative_eps=1e-3, merge_dims=False, exponent=-0.2,
        preconditioner_1d="full", grafting="adam", grafting_eps=1e-4, grafting_beta2=0.97,
        start_preconditioning_step=3, maximize=True, block_size=5, update_freq=10,
    ),
}  # fmt: skip

ADAGRAD: dict[str, dict[str, Any]] = {
    "diagonal": {},
    "diagonal_options": dict(
        lr_decay=0.02, weight_decay=0.1, initial_accumulator_value=0.1, maximize=True
    ),
    "full": dict(full_matrix=True, eps=1e-2),
    "full_blocks": dict(full_matrix=True, eps=1e-2, block_size=7, update_freq=3),
    "full_options": dict(
        full_matrix=True, eps=1e-3, block_size=16, update_freq=10, lr_decay=0.02,
        weight_decay=0.1, initial_accumulator_value=0.1, maximize=True,
    ),
}  # fmt: skip


def shampoo_options(case: str) -> dict[str, Any]:
    return {**BASE, **SHAMPOO[case]}


@functools.cache
def reference_history(optimizer: str, case: str, problem: str):
    if optimizer == "shampoo":
        options, reference = shampoo_options(case), ReferenceShampoo
        options.pop("root_method", None)
    else:
        options, reference = {"lr": 0.05, **ADAGRAD[case]}, ReferenceAdagrad
    return train(
        problem,
        torch.float64,
        lambda params: reference(params, **options),
        maximize=options.get("maximize", False),
    )


def assert_agree(history, expected, dtype: torch.dtype) -> None:
    """Every parameter after every step, relative to how far it has come from its start."""
    for step, (now, reference) in enumerate(zip(history, expected, strict=True)):
        for i, (p, q) in enumerate(zip(now, reference, strict=True)):
            travelled = (q - expected[0][i]).norm()
            error = (p.double() - q).norm()
            rounding = 4 * torch.finfo(dtype).eps * max(1, step) ** 0.5 * q.norm()
            assert error <= TOLERANCE[dtype] * travelled + rounding, (
                f"parameter {i} of shape {tuple(p.shape)} after step {step}: "
                f"error {error:.2e}, travelled {travelled:.2e}"
            )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("case", SHAMPOO)
def test_shampoo(case, problem, dtype):
    options = shampoo_options(case)
    history = train(
        problem,
        dtype,
        lambda params: torchium.Shampoo(params, **options),
        maximize=options.get("maximize", False),
    )
    assert_agree(history, reference_history("shampoo", case, problem), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("case", ADAGRAD)
def test_adagrad(case, problem, dtype):
    options = {"lr": 0.05, **ADAGRAD[case]}
    history = train(
        problem,
        dtype,
        lambda params: torchium.Adagrad(params, **options),
        maximize=options.get("maximize", False),
    )
    assert_agree(history, reference_history("adagrad", case, problem), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
def test_learning_rate_schedule(dtype):
    def reference_lr(optimizer, step):
        optimizer.lr = 0.05 / (1 + step)

    def library_lr(optimizer, step):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)

    options = {**BASE, "momentum": 0.9, "weight_decay": 0.1, "decoupled_weight_decay": True}
    expected = train(
        "mlp",
        torch.float64,
        lambda params: ReferenceShampoo(params, **options),
        before_step=reference_lr,
    )
    history = train(
        "mlp",
        dtype,
        lambda params: torchium.Shampoo(params, **options),
        before_step=library_lr,
    )
    assert_agree(history, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
def test_groups_with_their_own_options_and_a_late_group(dtype):
    """Three groups, the third added before step 20; the reference is three optimizers."""
    groups = [
        dict(lr=0.02, eps=1e-2, update_freq=1, block_size=8),
        dict(lr=0.01, eps=1e-2, update_freq=3, block_size=16, betas=(0.9, 0.95)),
        dict(lr=0.03, eps=1e-2, update_freq=10, block_size=1024, grafting="adagrad"),
    ]

    class Separate:
        def __init__(self, params):
            self.optimizers = [
                ReferenceShampoo(params[i::3], **options) for i, options in enumerate(groups)
            ]
            self.steps = 0

        def step(self):
            for optimizer in self.optimizers[: 2 if self.steps < 20 else 3]:
                optimizer.step()
            self.steps += 1

    def in_two_groups(params):
        optimizer = torchium.Shampoo(
            [{"params": params[i::3], **groups[i]} for i in range(2)],
        )
        optimizer.late_group = {"params": params[2::3], **groups[2]}
        return optimizer

    def add_late_group(optimizer, step):
        if step == 20:
            optimizer.add_param_group(optimizer.late_group)

    history = train("mlp", dtype, in_two_groups, before_step=add_late_group)
    assert_agree(history, train("mlp", torch.float64, Separate), dtype)
