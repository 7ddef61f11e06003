"""The arguments of a layer's call."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of a layer's call: ``input``, ``x`` of Conv1D of transformers, or its only tensor."""
    names = ("input", "x", *kwargs)
    value: Tensor = (
        args[0] if args else next(kwargs[n] for n in names if isinstance(kwargs.get(n), Tensor))
    )
    return value


def gets_input_alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the output follows from the input and the parameters.

    Not where a norm gets a gate too, as in Mamba. Transposed convolutions may get the size of their
    output.
    """
    values = (*args, *kwargs.values())
    if len(values) <= 1:
        return bool(values) and isinstance(values[0], Tensor)
    if isinstance(module, _ConvNd):
        return True
    signature = inspect.signature(type(module).forward)
    given = signature.bind(module, *args, **kwargs).arguments
    _, input, *others = given.items()
    return isinstance(input[1], Tensor) and all(
        value is signature.parameters[name].default for name, value in others
    )
