"""Configuration objects of Distributed Shampoo, read by the names of classes and attributes.

Its package need not be installed. The tables hold the attributes of each class with their defaults, at
commit f606606 of https://github.com/facebookresearch/optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch

# Classes, their attributes and defaults.
Known = Mapping[str, Mapping[str, Any]]

_ELEMENTWISE = {"epsilon": 1e-10}
_WITH_DECAY = {**_ELEMENTWISE, "drop_weighting_factor_on_gsquare": False}
ELEMENTWISE: Known = {
    "AdaGradPreconditionerConfig": _ELEMENTWISE,
    "RMSpropPreconditionerConfig": {**_WITH_DECAY, "beta2": 0.99},
    "AdamPreconditionerConfig": {**_WITH_DECAY, "beta2": 0.999},
}
GRAFTING: Known = {"SGDPreconditionerConfig": {}, **ELEMENTWISE}

_MATRICES: dict[str, Any] = {
    "amortized_computation_config": None,
    "drop_weighting_factor_on_gsquare": False,
    "factor_matrix_dtype": torch.float32,
    "inverse_exponent_override": {},
    "num_tolerated_failed_amortized_computations": 3,
    "trace_scaling_exponent": 0.5,
    "use_symmetric_packing": True,  # of the memory alone
    "use_trace_scaling": False,
}
MATRICES: Known = {
    "RootInvShampooPreconditionerConfig": {**_MATRICES, "inv_factor_matrix_dtype": torch.float32},
    "EigendecomposedShampooPreconditionerConfig": {
        **_MATRICES,
        "factor_matrix_eigenvectors_dtype": torch.float32,
        "factor_matrix_eigenvalues_dtype": torch.float32,
    },
}

_EIGENVALUES: dict[str, Any] = {
    "rank_deficient_stability_config": None,
    "tolerance": 0.0,
    # How a solver is called:
    "retry_double_precision": True,
    "eigendecomposition_offload_device": "",
}
ROOTS: Known = {
    "EigenConfig": _EIGENVALUES,
    "EighEigendecompositionConfig": _EIGENVALUES,
    "CoupledNewtonConfig": {"max_iterations": 100, "tolerance": 1e-6},
}
# Both orders of its operations have the same result.
PERTURBATION: Known = {"PerturbationConfig": {"perturb_before_computation": True}}

AVERAGING: Known = {
    "ClassicMomentumConfig": {"momentum": 0.5, "dampening": 0.0, "use_nesterov": False}
}

_TARGET = {"target_parameter_dimensionality": 1}
# torchium chooses the owners of blocks itself.
_RANKS = {
    **_TARGET,
    "communicate_params": False,
    "communication_dtype": torch.float32,
    "load_balancing_config": None,
    "num_trainers_per_group": -1,
}
_SHARDS = {
    **_TARGET,
    "load_balancing_config": None,
    "num_sub_groups": 1,
    "param_assignment_strategy": "DEFAULT",
}
DISTRIBUTED: Known = {
    "SingleDeviceDistributedConfig": _TARGET,
    "DDPDistributedConfig": _RANKS,
    "FullyShardDistributedConfig": _SHARDS,
    "HybridShardDistributedConfig": {**_RANKS, **_SHARDS, "device_mesh": None},
}

RUNTIME: Known = {"ShampooRuntimeConfig": {"eager_nan_check": False}}


class Config(NamedTuple):
    """A configuration object."""

    name: str  # of its class
    values: dict[str, Any]  # all attributes of its table


def read(argument: str, config: object, known: Known) -> Config:
    """Reads ``config``, an instance of one of the ``known`` classes.

    Raises ValueError for another class, a subclass among them, and for an attribute that is not known.
    """
    name = type(config).__name__
    if name not in known:
        raise ValueError(
            f"{argument} must be a {' or '.join(known)}: torchium has no other, got {config!r}"
        )
    given = vars(config)
    unknown = sorted(given.keys() - known[name].keys())
    if unknown:
        raise ValueError(
            f"{argument} has the attribute {unknown[0]}={given[unknown[0]]!r}, which torchium does not "
            f"know; it knows those of {name} at commit f606606: {', '.join(sorted(known[name])) or 'none'}"
        )
    return Config(name, {**known[name], **given})


def read_distributed(config: object) -> Config:
    """Reads a ``distributed_config``; None is the first class."""
    if config is None:
        name = "SingleDeviceDistributedConfig"
        return Config(name, dict(DISTRIBUTED[name]))
    read_config = read("distributed_config", config, DISTRIBUTED)
    target = read_config.values["target_parameter_dimensionality"]
    if target != math.inf and (not isinstance(target, int) or target < 1):
        raise ValueError(
            "distributed_config.target_parameter_dimensionality must be an integer of at least 1 or "
            f"math.inf, got {target!r}"
        )
    strategy = read_config.values.get("param_assignment_strategy")
    strategy = getattr(strategy, "name", strategy)
    if strategy not in (None, "REPLICATE", "ROUND_ROBIN"):
        refuse(
            "distributed_config.param_assignment_strategy",
            strategy,
            "use REPLICATE or ROUND_ROBIN: blocks are those of whole parameters, not of their shards",
        )
    return read_config


def refuse(argument: str, value: object, remedy: str) -> NoReturn:
    """Raises ValueError for a value that torchium's Shampoo cannot reproduce."""
    raise ValueError(f"{argument}={value!r} has no counterpart in torchium; {remedy}")
