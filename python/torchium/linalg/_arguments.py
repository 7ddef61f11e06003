"""Type checks of arguments; the operators check shapes, dtypes and values.

Without them, errors would quote the operator's schema. Under ``torch.compile`` they run while
tracing and leave nothing in the graph.
"""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

_LARGEST_INTEGER = 2**63 - 1  # the operators take int64


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor or a stand-in for one, such as a proxy of ``torch.fx``."""
    return isinstance(value, Tensor) or has_torch_function((value,))


def check_tensors(function: str, **arguments: Any) -> None:
    """Every argument must be a tensor."""
    for name, value in arguments.items():
        if not is_tensor(value):
            raise ValueError(
                f"{function}: {name} is {_described(value)}; it must be a tensor. {_remedy(value)}"
            )


def check_tensors_or_lists(function: str, **arguments: Any) -> bool:
    """All must be tensors, or all lists or tuples of tensors. Returns True for tensors."""
    is_one = not all(isinstance(value, (list, tuple)) for value in arguments.values())
    if not is_one:
        arguments = {
            f"{name}[{index}]": entry
            for name, entries in arguments.items()
            for index, entry in enumerate(entries)
        }
    check_tensors(function, **arguments)
    return is_one


def check_matrices(function: str, A: Any) -> bool:
    """``A`` must be a tensor, or a list or tuple of tensors. Returns True for one tensor."""
    if isinstance(A, (list, tuple)):
        check_tensors(function, **{f"A[{index}]": entry for index, entry in enumerate(A)})
        return False
    if not is_tensor(A):
        raise ValueError(
            f"{function}: A is {_described(A)}; it must be a tensor, or a list or tuple of tensors. "
            f"{_remedy(A)}"
        )
    return True


def check_numbers(function: str, **arguments: Any) -> None:
    """Every argument must be a number; the operators also read one-element tensors."""
    kinds = (numbers.Real, torch.SymInt, torch.SymFloat)
    for name, value in arguments.items():
        if not (isinstance(value, kinds) or is_tensor(value)):
            raise ValueError(f"{function}: {name} is {_described(value)}; it must be a number.")


def check_constant(function: str, name: str, value: Any, remedy: str) -> None:
    """``value`` must be a number, whose derivative would be lost."""
    check_numbers(function, **{name: value})
    if isinstance(value, Tensor) and _has_derivative(value):
        raise ValueError(
            f"{function}: {name} is {_described(value)}, which requires grad or has a tangent, but "
            f"it is read as a number without a derivative. {remedy}"
        )


def _has_derivative(value: Tensor) -> bool:
    in_reverse = torch.is_grad_enabled() and value.requires_grad
    return in_reverse or torch.autograd.forward_ad.unpack_dual(value).tangent is not None


def check_integer(function: str, name: str, value: Any, remedy: str) -> None:
    """``value`` must be an int64 integer."""
    whole = isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)
    if not whole or value > _LARGEST_INTEGER:
        raise ValueError(f"{function}: {name} is {_described(value)}; {remedy}")


def check_callable(function: str, name: str, value: Any) -> None:
    """``value`` must be a function."""
    if not callable(value):
        raise ValueError(f"{function}: {name} is {_described(value)}; it must be a function.")


def check_string(function: str, name: str, value: Any, remedy: str) -> None:
    """``value`` must be a string."""
    if not isinstance(value, str):
        raise ValueError(f"{function}: {name} is {_described(value)}; {remedy}")


def checked_params(function: str, params: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(params, Tensor):
        raise ValueError(f"{function}: params is a Tensor; it must be a list of parameters")
    if isinstance(params, torch.nn.Module):
        model = type(params).__name__
        raise ValueError(f"{function}: params is a model, {model}; pass model.parameters()")
    params = list(params)
    for i, p in enumerate(params):
        if not isinstance(p, Tensor):
            raise ValueError(
                f"{function}: params[{i}] is a {type(p).__name__}, not a Tensor; pass model.parameters()"
            )
    torch.ops.torchium.check_params(function, params)
    return params


def _described(value: Any) -> str:
    """The value and its class; of a tensor, also within lists, shape, dtype and device."""
    if isinstance(value, Tensor):
        return short(value)
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{short(value)} ({module}{kind.__qualname__})"


def short(value: Any) -> str:
    """The same without the class."""
    return _Short().repr(value)


class _Short(reprlib.Repr):
    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, Tensor):
            return f"a tensor of shape {list(x.shape)}, {x.dtype} on {x.device}"
        return super().repr1(x, level)


def _remedy(value: Any) -> str:
    if isinstance(value, (list, tuple)) and any(is_tensor(entry) for entry in value):
        return "Pass the tensors one by one, or torch.stack them."
    return "torch.as_tensor converts arrays and numbers."
