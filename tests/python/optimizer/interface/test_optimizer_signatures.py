"""Names, signatures, defaults and documented examples of the optimizers."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch
import torchium
from optimizer_cases import ignore_fallback, mlp

pytestmark = ignore_fallback


def test_the_package_and_its_module_export_the_same_classes():
    assert torchium.Shampoo is torchium.optimizers.Shampoo
    assert torchium.Adagrad is torchium.optimizers.Adagrad
    assert torchium.KFAC is torchium.optimizers.KFAC
    assert torchium.NaturalGradient is torchium.optimizers.NaturalGradient


def test_create_optimizer_by_name_in_any_case():
    params = list(mlp().parameters())
    optimizer = torchium.create_optimizer("ShamPOO", params, lr=0.5, momentum=0.9)
    assert type(optimizer) is torchium.Shampoo
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert type(torchium.create_optimizer("adagrad", params)) is torchium.Adagrad
    assert type(torchium.create_optimizer("kfac", mlp())) is torchium.KFAC
    by_name = torchium.create_optimizer("NaturalGradient", params, solver="cg")
    assert type(by_name) is torchium.NaturalGradient


@pytest.mark.parametrize("name", ["sgdd", "", "shampoo ", None, 3])
def test_create_optimizer_lists_the_names_for_an_unknown_one(name):
    with pytest.raises(ValueError, match=r"adagrad, .*shampoo"):
        torchium.create_optimizer(name, list(mlp().parameters()))


def test_available_optimizers_are_sorted_and_can_all_be_created():
    names = torchium.get_available_optimizers()
    assert names == sorted(names) == [n.lower() for n in names]
    assert {"adagrad", "kfac", "naturalgradient", "shampoo"} <= set(names)
    for name in names:
        assert torchium.create_optimizer(name, list(mlp().parameters()))


@pytest.mark.parametrize(
    "documented",
    [
        torchium.Shampoo,
        torchium.ShampooW,
        torchium.compat.DistributedShampoo,
        torchium.Adagrad,
        torchium.AdaHessian,
        torchium.KFAC,
        torchium.KFAC.update_curvature,
        torchium.KFAC.update_damping,
        torchium.KFACPreconditioner,
        torchium.NaturalGradient,
        torchium.NaturalGradient.update_curvature,
        torchium.NaturalGradient.update_jacobian,
        torchium.NaturalGradient.update_damping,
        torchium.create_optimizer,
        torchium.per_sample_gradients,
        torchium.gradients.clip_and_accumulate,
        torchium.gradients.register_layer,
    ],
)
def test_examples_of_the_docstrings_run(documented):
    names = {"torch": torch, "torchium": torchium, "model": mlp()}
    (example,) = doctest.DocTestFinder(recurse=False).find(
        documented, documented.__name__, globs=names
    )
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 0
    assert result.failed == 0


SIGNATURES = {
    torchium.Shampoo: (
        {"lr": 0.03, "eps": 1e-4, "update_freq": 100, "weight_decay": 0.0},
        {
            "betas": (0.0, 1.0),
            "momentum": 0.0,
            "nesterov": False,
            "decoupled_weight_decay": False,
            "relative_eps": 0.0,
            "block_size": 1024,
            "merge_dims": True,
            "target_order": None,
            "exponent": None,
            "exponent_warmup": 0,
            "preconditioner_1d": "diagonal",
            "preconditioned": True,
            "max_preconditioned_dim": 16384,
            "grafting": None,
            "grafting_eps": 1e-8,
            "grafting_beta2": None,
            "start_preconditioning_step": 1,
            "root_method": "auto",
            "root_dtype": None,
            "matmul_precision": None,
            "max_root_failures": 3,
            "maximize": False,
            "capturable": False,
            "graphs": "auto",
            "process_group": None,
            "comm_dtype": torch.float32,
            "bucket_bytes": 2**25,
        },
    ),
    torchium.Adagrad: (
        {
            "lr": 0.01,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
        },
        {
            "full_matrix": False,
            "block_size": 128,
            "update_freq": 1,
            "root_method": "eigh",
            "maximize": False,
            "graphs": "auto",
        },
    ),
    torchium.AdaHessian: (
        {
            "lr": 0.15,
            "betas": (0.9, 0.999),
            "eps": 1e-4,
            "weight_decay": 0.0,
            "hessian_power": 1.0,
            "update_each": 1,
            "n_samples": 1,
        },
        {"graphs": "auto", "grad_scaler": None},
    ),
    torchium.KFAC: (
        {
            "lr": 0.003,
            "momentum": 0.9,
            "weight_decay": 0.0,
            "damping": 0.01,
            "TCov": 5,
            "TInv": 10,
            "batch_averaged": True,
            "eps": 1e-8,
        },
        {
            "stat_decay": 0.95,
            "kl_clip": 1e-3,
            "damping_split": "pi",
            "ekfac": False,
            "solver": "auto",
            "structures": ("dense", "dense"),
            "block_size": 32,
            "alpha1": 0.5,
            "fisher": "empirical",
            "weight_sharing": "expand",
            "max_factor_size": 5000,
            "factor_dtype": None,
            "adaptive_damping": False,
            "grad_scaler": None,
            "maximize": False,
            "graphs": "auto",
            "capturable": False,
            "process_group": None,
            "grad_worker_fraction": 1.0,
            "skip_layers": (),
        },
    ),
    torchium.KFACPreconditioner: (
        {},
        {
            "factor_update_steps": 5,
            "inv_update_steps": 10,
            "damping": 0.01,
            "factor_decay": 0.95,
            "kl_clip": 1e-3,
            "lr": 0.1,
            "batch_averaged": True,
            "eps": 1e-8,
            "damping_split": "pi",
            "ekfac": False,
            "solver": "auto",
            "structures": ("dense", "dense"),
            "block_size": 32,
            "alpha1": 0.5,
            "fisher": "empirical",
            "weight_sharing": "expand",
            "max_factor_size": 5000,
            "factor_dtype": None,
            "grad_scaler": None,
            "process_group": None,
            "grad_worker_fraction": 1.0,
            "skip_layers": (),
        },
    ),
    torchium.NaturalGradient: (
        {"lr": 0.1, "damping": 1.0, "update_freq": 1, "eps": 1e-8},
        {
            "momentum": 0.9,
            "max_norm": None,
            "solver": "auto",
            "fisher": "empirical",
            "nystrom_rank": 0,
            "max_workspace_bytes": 2**28,
            "adaptive_damping": False,
            "grad_scaler": None,
            "maximize": False,
            "graphs": "auto",
            "capturable": False,
            "process_group": None,
        },
    ),
}


@pytest.mark.parametrize("cls", SIGNATURES)
def test_signature_and_defaults(cls):
    positional, keyword_only = SIGNATURES[cls]
    parameters = list(inspect.signature(cls).parameters.values())
    takes_model = issubclass(cls, (torchium.KFAC, torchium.NaturalGradient))
    assert parameters[0].name == ("params_or_model" if takes_model else "params")
    rest = [p for p in parameters[1:] if p.kind is not p.VAR_KEYWORD]  # which are unknown
    assert [p.name for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD] == list(positional)
    assert {p.name for p in rest if p.kind is p.KEYWORD_ONLY} == set(keyword_only)
    expected = {**positional, **keyword_only}
    assert {p.name: p.default for p in rest} == expected
    group = cls(mlp().parameters()).param_groups[0]
    for name in (
        "grad_scaler",
        "process_group",
        "grad_worker_fraction",
        "skip_layers",
        "comm_dtype",
        "bucket_bytes",
    ):
        expected.pop(name, None)
    assert {k: v for k, v in group.items() if k != "params"} == expected
