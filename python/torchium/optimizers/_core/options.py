"""Checks of optimizer options.

A check takes the option's name and value and returns the value as plain Python, so that a
``state_dict`` holds nothing else. It raises ``ValueError`` naming both.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Check = Callable[[str, Any], Any]


def number(
    low: float, high: float = math.inf, *, open_low: bool = False, closed_high: bool = False
) -> Check:
    """A finite real number from ``low`` to ``high``; the upper end is left out unless closed."""
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{']' if closed_high else ')'}"

    def check(name: str, value: Any) -> float:
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            result = _as_float(value)
            above = low < result if open_low else low <= result
            below = result <= high if closed_high else result < high
            if above and below and math.isfinite(result):
                return result
        raise ValueError(f"{name} must be a finite number in {interval}, got {value!r}")

    return check


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of an integer
        return math.inf if value > 0 else -math.inf


# The core counts in int64.
_LARGEST_INTEGER = 2**63 - 1


def integer(low: int) -> Check:
    """An integer of at least ``low``, and at most 2^63 - 1."""

    def check(name: str, value: Any) -> int:
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if whole and int(value) > _LARGEST_INTEGER:
            raise ValueError(f"{name} must be at most 2**63 - 1")
        if whole and int(value) >= low:
            return int(value)
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")

    return check


def choice(*choices: str | None) -> Check:
    """One of ``choices``."""

    def check(name: str, value: Any) -> str | None:
        if (value is None or isinstance(value, str)) and value in choices:
            return value
        allowed = ", ".join(repr(c) for c in choices)
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")

    return check


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"{name} must be True or False, got {value!r}")


def optional(check: Check) -> Check:
    """None, or what ``check`` accepts."""
    return lambda name, value: None if value is None else check(name, value)


def pair(first: Check, second: Check) -> Check:
    """Two values; their names in messages are ``name[0]`` and ``name[1]``."""

    def check(name: str, value: Any) -> tuple[Any, Any]:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise ValueError(f"{name} must be a pair of numbers, got {value!r}")
        return first(f"{name}[0]", value[0]), second(f"{name}[1]", value[1])

    return check


# A step computes in float32 unless the parameter is float64.
_lr_number = number(0.0, torch.finfo(torch.float32).max, closed_high=True)


def learning_rate(name: str, value: Any) -> float | Tensor:
    """A number of at least 0 that float32 can hold, or a real floating-point tensor of one."""
    if not isinstance(value, Tensor):
        return _lr_number(name, value)  # type: ignore[no-any-return]
    if value.numel() != 1 or not value.dtype.is_floating_point:
        raise ValueError(
            f"{name} as a tensor must be floating-point with one element, "
            f"got shape {list(value.shape)} of {value.dtype}"
        )
    if value.device.type != "meta":
        _lr_number(name, value.item())
    return value


def check_options(checks: dict[str, Check], options: dict[str, Any]) -> dict[str, Any]:
    """The checked value of each option in ``checks``."""
    return {name: check(name, options[name]) for name, check in checks.items()}


def lr_tensor(lr: float | Tensor, device: torch.device) -> Tensor:
    """``lr`` as the operators take it: 0-dim, float64 on the CPU or any float on ``device``."""
    if not isinstance(lr, Tensor):
        return torch.scalar_tensor(lr, dtype=torch.float64, device="cpu")
    lr = lr.detach().reshape(())
    return lr.to(torch.float64) if lr.is_cpu else lr.to(device, non_blocking=device.type != "cpu")
