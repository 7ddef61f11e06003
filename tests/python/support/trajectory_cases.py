"""Optimizer options for the comparison of trajectories."""

from __future__ import annotations

from typing import Any

# Small blocks, so that few dimensions divide evenly; damping that float32 roots can resolve.
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
    "flattened": dict(target_order=1, block_size=36, preconditioner_1d="full"),
    "flattened_diagonal": dict(target_order=1, block_size=24, grafting="adam", betas=(0.9, 0.95)),
    "merged_rows": dict(target_order=2, block_size=6, grafting="sgd"),
    "as_given": dict(target_order=0, preconditioner_1d="full"),
    "as_given_grafted": dict(
        target_order=0, block_size=2, preconditioner_1d="full", grafting="adam", betas=(0.9, 0.95)
    ),
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
    "unpreconditioned": dict(preconditioned=False),
    "unpreconditioned_sgd": dict(preconditioned=False, grafting="sgd", betas=(0.9, 0.95)),
    "unpreconditioned_adam": dict(
        preconditioned=False, grafting="adam", betas=(0.9, 0.95), momentum=0.5, nesterov=True,
        weight_decay=0.1, decoupled_weight_decay=True, start_preconditioning_step=5, lr=1e-3,
    ),
    "limit": dict(max_preconditioned_dim=9, grafting="adam", betas=(0.9, 0.95), weight_decay=0.1),
    "exponent_warmup": dict(exponent=-0.5, exponent_warmup=12, relative_eps=1e-2, update_freq=3),
    "limit_plain": dict(max_preconditioned_dim=8),
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


# optimizer -> case -> options
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "Shampoo": {case: {**BASE, **options} for case, options in SHAMPOO.items()},
    "Adagrad": {case: {"lr": 0.05, **options} for case, options in ADAGRAD.items()},
}
CASES = [(name, case) for name, cases in OPTIONS.items() for case in cases]


# `intermittent` has parameters of all shapes.
ALL_SHAPES = "intermittent"
OTHER_PROBLEMS = ("mlp", "convnet", "odd_shapes")


def cases_and_problems() -> list[tuple[str, str, str]]:
    """Every case with `ALL_SHAPES`, and with one other problem in turn."""
    return [
        (name, case, problem)
        for i, (name, case) in enumerate(CASES)
        for problem in (ALL_SHAPES, OTHER_PROBLEMS[i % len(OTHER_PROBLEMS)])
    ]
