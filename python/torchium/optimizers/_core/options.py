"""Options of the optimizers, by their lists in the core (``src/optim/core/options.h``).

The lists define names, types and requirements. Here values become plain Python objects, so that a
``state_dict`` holds nothing else.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

_WRONG = object()  # no value of its type
_LARGEST_INTEGER = 2**63 - 1  # the core counts in int64


class OptionList:
    """The options of one optimizer."""

    def __init__(self, optimizer: str) -> None:
        self.optimizer = optimizer

    @cached_property
    def _fields(self) -> dict[str, tuple[str, str]]:
        """Type and requirement by name."""
        names, kinds, requirements, *_ = torch.ops.torchium.option_fields(self.optimizer)
        return dict(zip(names, zip(kinds, requirements, strict=True), strict=True))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All but ``lr``."""
        return tuple(name for name in self._fields if name != "lr")

    @cached_property
    def scheduled(self) -> tuple[str, ...]:
        """Those that may be functions of the step number."""
        return tuple(torch.ops.torchium.option_fields(self.optimizer)[3])

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """Those that are the same in all groups."""
        return tuple(torch.ops.torchium.option_fields(self.optimizer)[4])

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The options among the arguments of a constructor."""
        return {name: arguments[name] for name in self._fields}

    def values(self, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """The options in the form that the core takes.

        Plain Python also of a checked group, where 0 may have taken the place of 0.0, which equals it.
        """
        return tuple(
            chain.from_iterable((name, self._plain(name, options[name])) for name in self.names)
        )

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All but ``lr`` as plain Python; raises ValueError for one that is wrong."""
        plain = {name: self._plain(name, options[name]) for name in self.names}
        self._refuse_wrong(tuple(chain.from_iterable(plain.items())), options)
        return plain

    def checked_one(self, name: str, value: Any) -> Any:
        """The same for one option."""
        plain = self._plain(name, value)
        self._refuse_wrong((name, plain), {name: value})
        return plain

    def checked_lr(self, lr: Any) -> float | Tensor:
        """A number, or a real floating-point tensor with one element."""
        if not isinstance(lr, Tensor):
            return self.checked_one("lr", lr)  # type: ignore[no-any-return]
        self.check_lr_tensor(lr)
        if lr.device.type != "meta":
            self.checked_lr(lr.item())
        return lr

    def check_lr_tensor(self, lr: Tensor) -> None:
        """All but its value."""
        if lr.numel() != 1 or not lr.dtype.is_floating_point:
            raise ValueError(
                "lr as a tensor must be floating-point with one element, "
                f"got shape {list(lr.shape)} of {lr.dtype}"
            )

    def _refuse_wrong(self, values: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        wrong = torch.ops.torchium.wrong_option(self.optimizer, values)
        if wrong:
            name, requirement = wrong
            option, _, index = name.partition("[")
            value = options[option][int(index[:-1])] if index else options[option]
            raise ValueError(f"{name} must be {requirement}, got {value!r}")

    def _wrong_type(self, name: str, value: Any) -> ValueError:
        _, requirement = self._fields[name]
        if name in self.scheduled and not isinstance(value, numbers.Number):
            requirement += ", or a function of the step number"
        remedy = ""
        if callable(value):
            remedy = (
                "; take a scheduler of torch.optim.lr_scheduler to change it"
                if name == "lr"
                else "; set it in param_groups to change it between steps"
            )
        return ValueError(f"{name} must be {requirement}, got {value!r}{remedy}")

    def _plain(self, name: str, value: Any) -> Any:
        kind, _ = self._fields[name]
        if value is None and kind.endswith("?"):
            return None
        if name == "graphs" and isinstance(value, bool):
            return "always" if value else "never"  # as C++ has them
        plain = _as_kind(kind.rstrip("?"), value)
        if plain is _WRONG:
            raise self._wrong_type(name, value)
        if isinstance(plain, int) and plain > _LARGEST_INTEGER:
            raise ValueError(f"{name} must be at most 2**63 - 1")
        return plain


def _as_kind(kind: str, value: Any) -> Any:
    """The value as a plain Python object of this type."""
    is_bool = isinstance(value, bool)
    if kind == "float" and isinstance(value, numbers.Real) and not is_bool:
        return as_float(value)
    if kind == "int" and isinstance(value, numbers.Integral) and not is_bool:
        return max(int(value), -_LARGEST_INTEGER)
    if kind == "bool" and is_bool:
        return value
    if kind == "str" and isinstance(value, (str, torch.dtype)):
        return str(value).removeprefix("torch.")  # a dtype by its name, as C++ has it
    if kind.startswith("pair of ") and isinstance(value, Sequence) and len(value) == 2:
        pair = tuple(_as_kind(kind.removeprefix("pair of "), each) for each in value)
        return _WRONG if _WRONG in pair else pair
    return _WRONG


def as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of an integer
        return math.inf if value > 0 else -math.inf
