"""Norms of other libraries, known by what they compute.

Transformers, timm and many models have classes of their own for RMSNorm (Zhang and Sennrich 2019,
arXiv 1910.07467), y = w x / sqrt(mean(x^2) + eps), also with 1 + w for w, and for LayerNorm. Names
and attributes alone do not show in which dimension they normalise, or where eps stands.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # also of modules that compute in float32
_TOLERANCE = 1e-4
# Shapes of the other dimensions. A module may refuse all but the first one.
_ROWS = ((2, 3), (4,), (2, 3, 2))
_IMAGES = ((2, 3, 2),)


class NormFormula(NamedTuple):
    name: str  # "rms_norm" or "layer_norm"
    of_channels: bool  # of dimension 1 of images, not of the last one


# What modules compute, by what that depends on.
_found: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], NormFormula | None]] = (
    WeakKeyDictionary()
)


def norm_eps(module: nn.Module) -> float | None:
    """The eps of a norm; None: it has none."""
    values = (module.__dict__.get(name) for name in _EPS_NAMES)
    return next((float(value) for value in values if isinstance(value, (int, float))), None)


def may_be_norm(module: nn.Module) -> bool:
    """Whether the module is named like a norm and has what one has."""
    own = module.__dict__
    if "_parameters" not in own:  # compiled by torch.jit
        return False
    params = {name: p for name, p in own["_parameters"].items() if p is not None}
    weight = params.get("weight")
    return (
        "norm" in type(module).__name__.lower()
        and "forward" not in own
        and not own["_modules"]
        and not own["_buffers"]
        and norm_eps(module) is not None
        and weight is not None
        and params.keys() <= {"weight", "bias"}
        and all(p.shape == weight.shape for p in params.values())
        and weight.dim() == 1
        and len(weight) > 1
    )


def norm_formula(module: nn.Module) -> NormFormula | None:
    """RMSNorm or LayerNorm of one dimension; None: the module computes neither.

    Runs a copy of the module with other parameters on a few rows, once for each forward and eps.
    """
    if not may_be_norm(module):
        return None
    weight = module._parameters["weight"]
    assert weight is not None
    if type(weight) not in (Tensor, nn.Parameter) or weight.is_meta:
        return None  # a shard, say
    key = type(module).forward, norm_eps(module), len(weight), weight.dtype
    known = _found.get(module)
    if known is None or known[0] != key:
        known = _found[module] = key, _examine(module)
    return known[1]


@torch.no_grad()
def _examine(module: nn.Module) -> NormFormula | None:
    twin, params = copy.copy(module), {}
    for name, p in module._parameters.items():
        if p is not None:
            values = _waves(len(p), 1.0 if name == "weight" else 2.0)
            params[name] = (0.5 * values + (name == "weight")).to(p)
    twin.__dict__["_parameters"] = params
    for of_channels, shapes in ((False, _ROWS), (True, _IMAGES)):
        common = _common_formula(twin, shapes, of_channels)
        if common is not None:
            return NormFormula(common, of_channels)
    return None


def _common_formula(
    module: nn.Module, shapes: tuple[tuple[int, ...], ...], of_channels: bool
) -> str | None:
    """The formula of what the module computes for all shapes that it takes, and for the first one."""
    weight, eps = module._parameters["weight"], norm_eps(module) or 0.0
    assert weight is not None
    found = set()
    for shape in shapes:
        rows = 1.0 + _waves(math.prod(shape) * len(weight), 3.0).view(*shape, len(weight))
        for scale in (1.0, eps**0.5) if eps > 0 else (1.0,):  # eps counts where numbers are small
            x = (scale * rows).to(weight)
            output = _output(module, x.movedim(-1, 1) if of_channels else x)
            if output is not None:
                output = output.movedim(1, -1) if of_channels else output
                found.add(_formula_of(output, x, module, eps))
            elif shape == shapes[0]:
                return None
    return found.pop() if len(found) == 1 else None


def _waves(count: int, frequency: float) -> Tensor:
    """Numbers between -1 and 1; the random numbers of the program stay as they are."""
    return torch.sin(frequency * torch.arange(1, count + 1, dtype=torch.float64))


def _output(module: nn.Module, x: Tensor) -> Tensor | None:
    """None: the module does not take this shape."""
    try:
        with torch.autocast(x.device.type, enabled=False):
            output = type(module).forward(module, x)
    except Exception:  # whatever code of others raises
        return None
    return output if isinstance(output, Tensor) and output.shape == x.shape else None


def _formula_of(output: Tensor, x: Tensor, module: nn.Module, eps: float) -> str | None:
    tolerance = _TOLERANCES.get(x.dtype, _TOLERANCE)
    x, output = x.double(), output.double()
    params = (module._parameters.get(name) for name in ("weight", "bias"))
    weight, bias = (0.0 if p is None else p.double() for p in params)
    centered = x - x.mean(-1, keepdim=True)
    for name, values in (("rms_norm", x), ("layer_norm", centered)):
        normalised = values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()
        for factor in (weight, 1.0 + weight):
            error = (output - factor * normalised - bias).abs().max()
            if error <= tolerance * output.abs().max():
                return name
    return None
