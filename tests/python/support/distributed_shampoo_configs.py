"""Configuration objects with the class names and attributes of Distributed Shampoo, for tests without its package."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch


class WeightDecayType(enum.Enum):
    L2 = "L2"
    DECOUPLED = "DECOUPLED"
    CORRECTED = "CORRECTED"
    INDEPENDENT = "INDEPENDENT"


@dataclass(kw_only=True)
class SGDPreconditionerConfig:
    pass


@dataclass(kw_only=True)
class AdaGradPreconditionerConfig:
    epsilon: float = 1e-10


@dataclass(kw_only=True)
class RMSpropPreconditionerConfig(AdaGradPreconditionerConfig):
    beta2: float = 0.99
    drop_weighting_factor_on_gsquare: bool = False


@dataclass(kw_only=True)
class AdamPreconditionerConfig(RMSpropPreconditionerConfig):
    beta2: float = 0.999


@dataclass(kw_only=True)
class PerturbationConfig:
    perturb_before_computation: bool = True


@dataclass(kw_only=True)
class PseudoInverseConfig:
    rank_atol: float = 0.0
    rank_rtol: float | None = 0.0


@dataclass(kw_only=True)
class EighEigendecompositionConfig:
    rank_deficient_stability_config: Any = field(default_factory=PerturbationConfig)
    tolerance: float = 0.0
    retry_double_precision: bool = True
    eigendecomposition_offload_device: str = ""


@dataclass(kw_only=True)
class EigenConfig(EighEigendecompositionConfig):
    pass


@dataclass(kw_only=True)
class QREigendecompositionConfig:
    rank_deficient_stability_config: Any = field(default_factory=PerturbationConfig)
    tolerance: float = 0.0
    max_iterations: int = 1


@dataclass(kw_only=True)
class CoupledNewtonConfig:
    max_iterations: int = 100
    tolerance: float = 1e-6


@dataclass(kw_only=True)
class _MatricesConfig:
    amortized_computation_config: Any = field(default_factory=EigenConfig)
    drop_weighting_factor_on_gsquare: bool = False
    factor_matrix_dtype: torch.dtype = torch.float32
    num_tolerated_failed_amortized_computations: int = 3
    use_symmetric_packing: bool = True
    use_trace_scaling: bool = False
    trace_scaling_exponent: float = 0.5
    inverse_exponent_override: dict[int, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RootInvShampooPreconditionerConfig(_MatricesConfig):
    inv_factor_matrix_dtype: torch.dtype = torch.float32


@dataclass(kw_only=True)
class RootInvKLShampooPreconditionerConfig(RootInvShampooPreconditionerConfig):
    pass


@dataclass(kw_only=True)
class EigendecomposedShampooPreconditionerConfig(_MatricesConfig):
    amortized_computation_config: Any = field(default_factory=EighEigendecompositionConfig)
    factor_matrix_eigenvectors_dtype: torch.dtype = torch.float32
    factor_matrix_eigenvalues_dtype: torch.dtype = torch.float32


@dataclass(kw_only=True)
class ClassicMomentumConfig:
    momentum: float = 0.5
    dampening: float = 0.0
    use_nesterov: bool = False


@dataclass(kw_only=True)
class GeneralizedPrimalAveragingConfig:
    eval_interp_coeff: float = 0.9
    train_interp_coeff: float = 0.8


@dataclass(kw_only=True)
class SingleDeviceDistributedConfig:
    target_parameter_dimensionality: int | float = 1


@dataclass(kw_only=True)
class DDPDistributedConfig(SingleDeviceDistributedConfig):
    communication_dtype: torch.dtype = torch.float32
    num_trainers_per_group: int = -1
    communicate_params: bool = False
    load_balancing_config: Any = None


@dataclass(kw_only=True)
class FSDPDistributedConfig(SingleDeviceDistributedConfig):
    param_to_metadata: Any = None


class FSDPParamAssignmentStrategy(enum.Enum):
    DEFAULT = enum.auto()
    REPLICATE = enum.auto()
    ROUND_ROBIN = enum.auto()


@dataclass(kw_only=True)
class FullyShardDistributedConfig(SingleDeviceDistributedConfig):
    param_assignment_strategy: Any = FSDPParamAssignmentStrategy.DEFAULT
    num_sub_groups: int = 1


@dataclass(kw_only=True)
class HybridShardDistributedConfig(FullyShardDistributedConfig, DDPDistributedConfig):
    device_mesh: Any


@dataclass(kw_only=True)
class ShampooRuntimeConfig:
    eager_nan_check: bool = False
