"""Detects operators of this thread that draw random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DRAWN = (
    "the model or loss_fn draws random numbers, so the gradient of a sample is not defined; "
    "call model.eval() or set the dropout probabilities to 0"
)


class NoRandomNumbers(TorchDispatchMode):
    """Raises before an operator draws random numbers; other threads may draw."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _draws(
            func, args, kwargs
        ):
            raise ValueError(DRAWN)
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers: not without dropout."""
    # Arguments equal to their default are not passed.
    arguments = func._schema.arguments
    values = {a.name: a.default_value for a in arguments}
    values |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    if values.get("training") is False or values.get("train") is False:
        return False
    probability = values.get("dropout_p", values.get("dropout"))
    return probability is None or probability > 0
