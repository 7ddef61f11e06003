"""Descriptions of layers for the core, and when they change."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from .layers import (
    call_row,
    input_padding,
    is_1d,
    layer_kind,
    layer_params,
    moves_channels,
    used_statistics,
)
from .norms import norm_eps

# Attributes that a forward pass reads, besides the parameters.
_ATTRIBUTES: dict[type[nn.Module], Callable[[nn.Module], Any]] = {
    _ConvNd: attrgetter(
        "stride", "padding", "dilation", "groups", "padding_mode", "kernel_size", "transposed"
    ),
    nn.Embedding: attrgetter("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"),
    nn.LayerNorm: attrgetter("normalized_shape", "eps"),
    nn.RMSNorm: attrgetter("normalized_shape", "eps"),
    nn.GroupNorm: attrgetter("num_groups", "eps"),
    _BatchNorm: lambda module: (module.eps, module.training, *map(id, used_statistics(module))),
}


def _nothing(module: nn.Module) -> None:
    """What is read of a linear layer."""


# Of the classes seen so far.
_getters: dict[type[nn.Module], Callable[[nn.Module], Any]] = {}


def layer_signature(module: nn.Module) -> tuple[Any, ...]:
    """The values that :func:`describe` and the support of a layer depend on."""
    cls, own = type(module), module.__dict__
    if cls not in _getters:
        found = [getter for known, getter in _ATTRIBUTES.items() if issubclass(cls, known)]
        of_others = norm_eps if "norm" in cls.__name__.lower() else _nothing
        _getters[cls] = found[0] if found else of_others
    weight, bias = layer_params(module)
    return (
        cls.forward,
        own.get("forward"),
        own.get("_conv_forward"),
        id(weight),
        id(bias),
        weight is not None and weight.requires_grad,
        bias is not None and bias.requires_grad,
        _getters[cls](module),
    )


def kept(signature: tuple[Any, ...]) -> tuple[Any, ...]:
    """A copy to compare with later signatures; a list in it, which may change, equals none."""
    *parts, attributes = signature
    if isinstance(attributes, tuple):
        attributes = tuple(None if isinstance(each, list) else each for each in attributes)
    return (*parts, attributes)


def _text(module: nn.Module) -> str:
    """For messages; PyTorch prints no module in a cycle, nor a convolution with ``padding = 2``."""
    try:
        return str(module)
    except (RecursionError, TypeError):
        return type(module).__name__


def describe(module: nn.Module) -> tuple[Any, ...]:
    """The arguments of ``ModuleCapture::describe`` (``src/ops/module_capture.h``)."""
    text, tensors = _text(module), (*layer_params(module), *used_statistics(module))
    if layer_kind(module) is None:  # only Python knows it
        return [], 0.0, [], "", False, False, text, *tensors
    row, eps = call_row(module, -1, -1, 0)
    adds_height, moves = is_1d(module), moves_channels(module)
    return row, eps, *input_padding(module), adds_height, moves, text, *tensors
