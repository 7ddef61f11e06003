"""Options of Distributed Shampoo as those of torchium's Shampoo."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optimizers._core.options import OptionList
from ._configs import (
    AVERAGING,
    ELEMENTWISE,
    GRAFTING,
    MATRICES,
    PERTURBATION,
    ROOTS,
    Config,
    read,
    read_distributed,
    refuse,
)

_SHAMPOO = OptionList("Shampoo")
_INFINITY = 2**63 - 1  # of an integer
_DECAY_TYPES = ("L2", "DECOUPLED", "CORRECTED", "INDEPENDENT")
_METHODS = {
    "SGDPreconditionerConfig": "sgd",
    "AdaGradPreconditionerConfig": "adagrad",
    "RMSpropPreconditionerConfig": "rmsprop",
    "AdamPreconditionerConfig": "adam",
}


def shampoo_options(theirs: Mapping[str, Any], params: Sequence[Tensor] = ()) -> dict[str, Any]:
    """The options of Shampoo but ``lr`` that ``theirs`` sets, for a group of parameters.

    Raises ValueError, with the names of Distributed Shampoo, for options that Shampoo cannot reproduce.
    """
    betas = _betas(theirs)
    momentum = _momentum(theirs)
    options = {
        "betas": betas,
        **momentum,
        **_decay(theirs, momentum["momentum"] > 0.0),
        **_schedule(theirs),
        "eps": _positive_eps(theirs),
        "preconditioned": True,
        "max_preconditioned_dim": None,
        "grafting": None,
    }
    if type(theirs["preconditioner_config"]).__name__ in GRAFTING:
        return {**options, **_without_matrices(theirs)}
    if theirs["grafting_config"] is not None:
        options |= _elementwise(
            "grafting_config", read("grafting_config", theirs["grafting_config"], GRAFTING)
        )
    return {**options, **_matrices(theirs, betas[1], params)}


def _checked(argument: str, option: str, value: Any) -> Any:
    """A value that Shampoo's ``option`` takes; errors name ``argument``."""
    try:
        return _SHAMPOO.checked_one(option, value)
    except ValueError as error:
        raise ValueError(str(error).replace(option, argument, 1)) from None


def _betas(theirs: Mapping[str, Any]) -> tuple[float, float]:
    betas: tuple[float, float] = _checked("betas", "betas", theirs["betas"])
    if theirs["beta3"] not in (-1.0, betas[0]):
        refuse("beta3", theirs["beta3"], "use -1.0, which is betas[0]")
    corrects_statistics = betas[1] != 1.0 and _uses_matrices(theirs)
    if not theirs["use_bias_correction"] and (betas[0] != 0.0 or corrects_statistics):
        refuse(
            "use_bias_correction",
            theirs["use_bias_correction"],
            "averages are always corrected: use True, or betas=(0.0, 1.0), which have no correction",
        )
    return betas


def _uses_matrices(theirs: Mapping[str, Any]) -> bool:
    name = type(theirs["preconditioner_config"]).__name__
    return name not in GRAFTING and theirs["start_preconditioning_step"] != math.inf


def _momentum(theirs: Mapping[str, Any]) -> dict[str, Any]:
    config = theirs["iterate_averaging_config"]
    if config is None:
        return {"momentum": 0.0, "nesterov": False}
    values = read("iterate_averaging_config", config, AVERAGING).values
    dampening = values["dampening"]
    if dampening:
        # M <- mu M + (1 - d) P is (1 - d) times the momentum without it.
        refuse(
            "iterate_averaging_config.dampening",
            dampening,
            f"use dampening=0.0 and multiply lr by {1 - dampening:g}, which is the same",
        )
    nesterov = values["use_nesterov"]
    if not isinstance(nesterov, bool):
        raise ValueError(
            f"iterate_averaging_config.use_nesterov must be True or False, got {nesterov!r}"
        )
    momentum = _checked("iterate_averaging_config.momentum", "momentum", values["momentum"])
    return {"momentum": momentum, "nesterov": nesterov}


def _decay(theirs: Mapping[str, Any], has_momentum: bool) -> dict[str, Any]:
    decay = _checked("weight_decay", "weight_decay", theirs["weight_decay"])
    kind = getattr(theirs["weight_decay_type"], "name", theirs["weight_decay_type"])
    if kind not in _DECAY_TYPES:
        raise ValueError(
            f"weight_decay_type must be one of {', '.join(_DECAY_TYPES)}, by name or as a member of "
            f"WeightDecayType, got {theirs['weight_decay_type']!r}"
        )
    if decay and kind == "CORRECTED":
        refuse("weight_decay_type", kind, "use DECOUPLED, which is the same while lr is constant")
    if decay and kind != "L2" and has_momentum:
        refuse(
            "weight_decay_type",
            kind,
            "with ClassicMomentumConfig, whose momentum averages the decay too, use L2",
        )
    if decay and kind == "INDEPENDENT":
        peak = float(theirs["peak_lr"])
        if not peak > 0.0:
            raise ValueError(
                f"peak_lr must be above 0 for weight_decay_type=INDEPENDENT, got {peak!r}"
            )
        decay /= peak  # p <- p - lr decay / peak_lr p
    return {"weight_decay": decay, "decoupled_weight_decay": kind != "L2"}


def _schedule(theirs: Mapping[str, Any]) -> dict[str, Any]:
    frequency = _checked("precondition_frequency", "update_freq", theirs["precondition_frequency"])
    name = "start_preconditioning_step"
    start = {-1: frequency, math.inf: _INFINITY}.get(theirs[name], theirs[name])
    start = _checked(name, name, start)
    if start < frequency:
        raise ValueError(
            f"{name} must be -1 or at least precondition_frequency={frequency}, got {start}"
        )
    return {"update_freq": frequency, name: start}


def _positive_eps(theirs: Mapping[str, Any]) -> float:
    eps: float = _checked("epsilon", "eps", theirs["epsilon"])
    if eps == 0.0:
        raise ValueError("epsilon must be above 0, got 0.0")
    return eps


def _without_matrices(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """With a grafting method as the preconditioner: its direction in every step."""
    config = read("preconditioner_config", theirs["preconditioner_config"], GRAFTING)
    if theirs["grafting_config"] is not None:
        remedy = f"leave it out with preconditioner_config={config.name}"
        refuse("grafting_config", theirs["grafting_config"], remedy)
    rule = {"preconditioned": False, "start_preconditioning_step": _INFINITY}
    if config.name in ELEMENTWISE:
        rule |= _elementwise("preconditioner_config", config)
    return rule


def _elementwise(argument: str, config: Config) -> dict[str, Any]:
    """A grafting method."""
    values = config.values
    if values.get("drop_weighting_factor_on_gsquare"):
        refuse(f"{argument}.drop_weighting_factor_on_gsquare", True, "use False")
    options = {"grafting": _METHODS[config.name]}
    for name, option in (("epsilon", "grafting_eps"), ("beta2", "grafting_beta2")):
        if name in values:
            options[option] = _checked(f"{argument}.{name}", option, values[name])
    return options


def _matrices(theirs: Mapping[str, Any], beta2: float, params: Sequence[Tensor]) -> dict[str, Any]:
    argument = "preconditioner_config"
    config = theirs[argument]
    values = MATRICES["RootInvShampooPreconditionerConfig"]
    if config is not None:
        values = read(argument, config, {**MATRICES, **GRAFTING}).values
    if values["drop_weighting_factor_on_gsquare"] and beta2 != 1.0:
        refuse(f"{argument}.drop_weighting_factor_on_gsquare", True, "use False, or betas[1]=1.0")
    if values["use_trace_scaling"]:
        refuse(f"{argument}.use_trace_scaling", True, "use False")
    tolerated = values["num_tolerated_failed_amortized_computations"]
    name = f"{argument}.num_tolerated_failed_amortized_computations"
    if not isinstance(tolerated, int) or isinstance(tolerated, bool) or tolerated < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {tolerated!r}")

    block_size = _block_size(theirs["max_preconditioner_dim"])
    name = "target_parameter_dimensionality"
    target = read_distributed(theirs["distributed_config"]).values[name]
    target_order = 0 if target == math.inf else _checked(name, "target_order", target)
    merged_dims = torch.ops.torchium.merged_dims
    orders = {len(merged_dims(p.shape, block_size, target_order)) for p in params if p.numel()}
    orders -= {0}  # has no matrices
    return {
        "block_size": block_size,
        "target_order": target_order,
        "preconditioner_1d": "full",
        "exponent": _exponent(f"{argument}.inverse_exponent_override", values, orders),
        "root_method": _root_method(f"{argument}.amortized_computation_config", values),
        "root_dtype": _root_dtype(argument, values, [p.dtype for p in params]),
        "max_root_failures": tolerated + 1,  # an error at the failure that is not tolerated
    }


def _block_size(dim: Any) -> int:
    if dim == math.inf:
        return _INFINITY
    size: int = _checked("max_preconditioner_dim", "block_size", dim)
    return size


def _exponent(argument: str, values: Mapping[str, Any], orders: set[int]) -> float | None:
    """Shampoo's ``exponent``, if parameters of all these orders have the same."""
    override = values["inverse_exponent_override"]
    powers = set()
    changed = False
    for order in orders:
        default = 1 / (2 * order)
        given = override.get(order, {})
        for dim in range(order):
            power = given.get(dim, default) if isinstance(given, Mapping) else given
            powers.add(power)
            changed |= power != default
    if not changed:
        return None
    if 0.0 in powers:
        refuse(argument, override, "every dimension is preconditioned: use powers above 0")
    if len(powers) > 1:
        refuse(
            argument,
            override,
            f"a group has one exponent, and its parameters of order {_listed(orders)} would have "
            f"{_listed(powers)}: make a group for each, with one power for all dimensions",
        )
    exponent: float = _checked(argument, "exponent", -powers.pop())
    return exponent


def _listed(values: set[Any]) -> str:
    return " and ".join(f"{value:g}" for value in sorted(values))


def _root_method(argument: str, values: Mapping[str, Any]) -> str:
    config = values["amortized_computation_config"]
    if config is None:
        return "auto"
    root = read(argument, config, ROOTS)
    if root.name == "CoupledNewtonConfig":
        return "newton"
    if root.values["tolerance"]:
        refuse(f"{argument}.tolerance", root.values["tolerance"], "use 0.0: nothing is skipped")
    if root.values["rank_deficient_stability_config"] is not None:
        name = f"{argument}.rank_deficient_stability_config"
        read(name, root.values["rank_deficient_stability_config"], PERTURBATION)
    return "auto"  # the same function of the matrix, by the faster solver


def _root_dtype(argument: str, values: Mapping[str, Any], dtypes: list[torch.dtype]) -> str | None:
    """Shampoo's ``root_dtype``; checks all dtypes of the state."""
    can_be_double = all(dtype == torch.float64 for dtype in dtypes)
    root_dtype = None
    for name, dtype in values.items():
        if not name.endswith("_dtype") or dtype == torch.float32:
            continue
        if name == "inv_factor_matrix_dtype" and dtype == torch.bfloat16:
            root_dtype = "bfloat16"
        elif dtype != torch.float64 or not can_be_double:
            refuse(
                f"{argument}.{name}",
                dtype,
                "use torch.float32: state is float32, and float64 for float64 parameters",
            )
    return root_dtype
