"""What torchium.compat.DistributedShampoo refuses, and the remedies that it names."""

from __future__ import annotations

import distributed_shampoo_configs as configs
import pytest
import torch
from torch import nn
from torchium.compat import DistributedShampoo

KEEPS_MATRICES = configs.SingleDeviceDistributedConfig(target_parameter_dimensionality=2)
SHAMPOO = configs.RootInvShampooPreconditionerConfig
REFUSED = {
    "beta3": ({"beta3": 0.5}, r"beta3=0\.5 .*use -1\.0"),
    "bias correction": ({"use_bias_correction": False}, "use_bias_correction=False .*use True"),
    "dampening": (
        {"iterate_averaging_config": configs.ClassicMomentumConfig(dampening=0.25)},
        r"iterate_averaging_config\.dampening=0\.25 .*multiply lr by 0\.75",
    ),
    "primal averaging": (
        {"iterate_averaging_config": configs.GeneralizedPrimalAveragingConfig()},
        "iterate_averaging_config must be a ClassicMomentumConfig: .*GeneralizedPrimalAveraging",
    ),
    "corrected decay": (
        {"weight_decay": 0.1, "weight_decay_type": configs.WeightDecayType.CORRECTED},
        "weight_decay_type='CORRECTED' .*DECOUPLED",
    ),
    "decay and momentum": (
        {"weight_decay": 0.1, "iterate_averaging_config": configs.ClassicMomentumConfig()},
        "weight_decay_type='DECOUPLED' .*use L2",
    ),
    "unknown decay": ({"weight_decay_type": "l2"}, "weight_decay_type must be one of L2, .*'l2'"),
    "independent without lr": (
        {"lr": 0.0, "weight_decay": 0.1, "weight_decay_type": "INDEPENDENT"},
        "peak_lr must be above 0",
    ),
    "epsilon": ({"epsilon": -1.0}, "epsilon must be a finite number .*got -1"),
    "no epsilon": ({"epsilon": 0.0}, "epsilon must be above 0"),
    "frequency": ({"precondition_frequency": 0}, "precondition_frequency must be .*got 0"),
    "start": (
        {"precondition_frequency": 4, "start_preconditioning_step": 3},
        "start_preconditioning_step must be -1 or at least precondition_frequency=4, got 3",
    ),
    "blocks": ({"max_preconditioner_dim": 10.5}, r"max_preconditioner_dim must be .*got 10\.5"),
    "eager checks": (
        {"shampoo_runtime_config": configs.ShampooRuntimeConfig(eager_nan_check=True)},
        r"shampoo_runtime_config\.eager_nan_check=True .*use False",
    ),
    "unknown grafting": (
        {"grafting_config": SHAMPOO()},
        "grafting_config must be a SGDPreconditionerConfig or .*RootInvShampoo",
    ),
    "grafting without a decay": (
        {"grafting_config": configs.RMSpropPreconditionerConfig(beta2=1.0)},
        r"grafting_config\.beta2 must be .*got 1\.0",
    ),
    "unweighted grafting": (
        {
            "grafting_config": configs.AdamPreconditionerConfig(
                drop_weighting_factor_on_gsquare=True
            )
        },
        r"grafting_config\.drop_weighting_factor_on_gsquare=True",
    ),
    "grafting without matrices": (
        {
            "grafting_config": configs.SGDPreconditionerConfig(),
            "preconditioner_config": configs.AdamPreconditionerConfig(),
        },
        "grafting_config=SGDPreconditionerConfig.*leave it out",
    ),
    "another preconditioner": (
        {"preconditioner_config": configs.RootInvKLShampooPreconditionerConfig()},
        "preconditioner_config must be a RootInvShampooPreconditionerConfig or .*KLShampoo",
    ),
    "no configuration": ({"preconditioner_config": "shampoo"}, "preconditioner_config must be"),
    "trace scaling": (
        {"preconditioner_config": SHAMPOO(use_trace_scaling=True)},
        r"preconditioner_config\.use_trace_scaling=True",
    ),
    "unweighted statistics": (
        {
            "betas": (0.9, 0.9),
            "preconditioner_config": SHAMPOO(drop_weighting_factor_on_gsquare=True),
        },
        r"preconditioner_config\.drop_weighting_factor_on_gsquare=True .*betas\[1\]=1\.0",
    ),
    "failures": (
        {"preconditioner_config": SHAMPOO(num_tolerated_failed_amortized_computations=-1)},
        "num_tolerated_failed_amortized_computations must be",
    ),
    "dtype of statistics": (
        {"preconditioner_config": SHAMPOO(factor_matrix_dtype=torch.bfloat16)},
        r"preconditioner_config\.factor_matrix_dtype=torch\.bfloat16 .*use torch\.float32",
    ),
    "dtype of roots": (
        {"preconditioner_config": SHAMPOO(inv_factor_matrix_dtype=torch.float64)},
        r"preconditioner_config\.inv_factor_matrix_dtype=torch\.float64",
    ),
    "no power": (
        {"preconditioner_config": SHAMPOO(inverse_exponent_override={2: {0: 0.0}})},
        r"inverse_exponent_override=.*use powers above 0",
    ),
    "two powers": (
        {"preconditioner_config": SHAMPOO(inverse_exponent_override={2: 0.3})},
        r"inverse_exponent_override=.*of order 1 and 2 would have 0\.3 and 0\.5: make a group",
    ),
    "pseudo-inverse": (
        {
            "preconditioner_config": SHAMPOO(
                amortized_computation_config=configs.EigenConfig(
                    rank_deficient_stability_config=configs.PseudoInverseConfig()
                )
            )
        },
        r"amortized_computation_config\.rank_deficient_stability_config must be a PerturbationConfig",
    ),
    "QR": (
        {
            "preconditioner_config": configs.EigendecomposedShampooPreconditionerConfig(
                amortized_computation_config=configs.QREigendecompositionConfig()
            )
        },
        r"amortized_computation_config must be a EigenConfig or .*QREigendecompositionConfig",
    ),
    "skipped eigenvalues": (
        {
            "preconditioner_config": configs.EigendecomposedShampooPreconditionerConfig(
                amortized_computation_config=configs.EighEigendecompositionConfig(tolerance=0.1)
            )
        },
        r"amortized_computation_config\.tolerance=0\.1 .*use 0\.0",
    ),
    "target": (
        {
            "distributed_config": configs.SingleDeviceDistributedConfig(
                target_parameter_dimensionality=0
            )
        },
        "target_parameter_dimensionality must be .*got 0",
    ),
    "flat shards": (
        {"distributed_config": configs.FSDPDistributedConfig()},
        "distributed_config must be a SingleDeviceDistributedConfig or DDPDistributedConfig or Fully",
    ),
    "blocks of shards": (
        {"distributed_config": configs.FullyShardDistributedConfig()},
        "distributed_config.param_assignment_strategy='DEFAULT' .* use REPLICATE or ROUND_ROBIN",
    ),
    "no process group": (
        {"distributed_config": configs.DDPDistributedConfig(target_parameter_dimensionality=2)},
        r"distributed_config=DDPDistributedConfig needs .*init_process_group\(\)",
    ),
    "parameters travel": (
        {
            "distributed_config": configs.DDPDistributedConfig(
                target_parameter_dimensionality=2, communicate_params=True
            )
        },
        r"distributed_config\.communicate_params=True",
    ),
    "dtype of communication": (
        {
            "distributed_config": configs.DDPDistributedConfig(
                target_parameter_dimensionality=2, communication_dtype=torch.int8
            )
        },
        r"distributed_config\.communication_dtype must be one of .*torch\.int8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    arguments, message = REFUSED[case]
    params = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4))]
    with pytest.raises(ValueError, match=message):
        DistributedShampoo(params, **{"distributed_config": KEEPS_MATRICES, **arguments})


def test_refuses_attributes_that_it_does_not_know():
    config = SHAMPOO()
    config.new_feature = True
    with pytest.raises(
        ValueError, match="preconditioner_config has the attribute new_feature=True"
    ):
        DistributedShampoo([nn.Parameter(torch.ones(40, 40))], preconditioner_config=config)


def test_older_configurations_may_lack_attributes():
    config = SHAMPOO()
    del config.use_symmetric_packing
    DistributedShampoo([nn.Parameter(torch.ones(40, 40))], preconditioner_config=config)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (nn.Linear(2, 2), ValueError, "takes parameters, not a model"),
        (torch.ones(2), TypeError, "params must be an iterable"),
        ([], ValueError, "empty"),
        (
            [{"params": [nn.Parameter(torch.ones(2))], "eps": 1e-3}],
            ValueError,
            "eps=0.001 of group 0",
        ),
        ([{"params": [nn.Parameter(torch.ones(2))], "epsilon": -1}], ValueError, "epsilon"),
        ([{"lr": 1.0}], KeyError, "params"),
    ],
    ids=["a model", "a tensor", "nothing", "an option of Shampoo", "a wrong option", "no params"],
)
def test_refuses_parameters(params, error, message):
    with pytest.raises(error, match=message):
        DistributedShampoo(params)
