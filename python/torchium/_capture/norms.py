"""Norms of other libraries, known by what they compute.

Transformers, timm and many models have classes of their own for RMSNorm (Zhang and Sennrich 2019,
arXiv 1910.07467), y = w x / sqrt(mean(x^2) + eps), also with 1 + w for w, and for LayerNorm. Names
and attributes alone do not show in which dimension they normalise, or where eps stands.
"""

from __future__ import annotations

import copy
import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # also of modules that compute in float32
_TOLERANCE = 1e-4
# Shapes before the normalised dimension. A module may refuse all but the first one.
_PROBE_SHAPES = ((2, 3), (4,), (2, 3, 2))

# What modules compute, by what that depends on.
_found: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], str | None]] = WeakKeyDictionary()


def norm_eps(module: nn.Module) -> float | None:
    """The eps of a norm; None: it has none."""
    values = (module.__dict__.get(name) for name in _EPS_NAMES)
    return next((float(value) for value in values if isinstance(value, (int, float))), None)


def may_be_norm(module: nn.Module) -> bool:
    """Whether the module is named like a norm and has what one has."""
    own = module.__dict__
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


def norm_formula(module: nn.Module) -> str | None:
    """``"rms_norm"`` or ``"layer_norm"`` of the last dimension; None: the module computes neither.

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
def _examine(module: nn.Module) -> str | None:
    twin, params = copy.copy(module), {}
    for name, p in module._parameters.items():
        if p is not None:
            values = _waves(len(p), 1.0 if name == "weight" else 2.0)
            params[name] = (0.5 * values + (name == "weight")).to(p)
    twin.__dict__["_parameters"] = params
    eps, weight = norm_eps(module) or 0.0, params["weight"]
    found = set()
    for shape in _PROBE_SHAPES:
        rows = 1.0 + _waves(math.prod(shape) * len(weight), 3.0).view(*shape, len(weight))
        for scale in (1.0, eps**0.5) if eps > 0 else (1.0,):  # eps counts where numbers are small
            x = (scale * rows).to(weight)
            output = _output(twin, x)
            if output is not None:
                found.add(_formula_of(output, x, params, eps))
            elif shape == _PROBE_SHAPES[0]:
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


def _formula_of(output: Tensor, x: Tensor, params: dict[str, Tensor], eps: float) -> str | None:
    x, output = x.double(), output.double()
    weight, bias = (params[n].double() if n in params else 0.0 for n in ("weight", "bias"))
    centered = x - x.mean(-1, keepdim=True)
    for name, values in (("rms_norm", x), ("layer_norm", centered)):
        normalised = values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()
        for factor in (weight, 1.0 + weight):
            error = (output - factor * normalised - bias).abs().max()
            if error <= _TOLERANCES.get(params["weight"].dtype, _TOLERANCE) * output.abs().max():
                return name
    return None
