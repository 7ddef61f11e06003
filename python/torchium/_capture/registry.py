"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, ParamsT

from .. import optimizers

_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    name.lower(): getattr(optimizers, name)
    for name in optimizers.__all__
    if name != "KFACPreconditioner"  # moves no parameters
}


def get_available_optimizers() -> list[str]:
    """Names that :func:`create_optimizer` knows: lower-case, sorted."""
    return sorted(_OPTIMIZERS)


def create_optimizer(name: str, params: ParamsT, **kwargs: Any) -> Optimizer:
    """An optimizer by its name.

    Args:
        name: name of the class, in any case: ``"shampoo"``, ``"Adagrad"``.
        params: what the class takes as its first argument.
        **kwargs: options of the class.

    Raises:
        ValueError: the name is not known; the message lists those that are.

    Example:
        >>> optimizer = torchium.create_optimizer("shampoo", model.parameters(), lr=0.1)
    """
    if not isinstance(name, str) or name.lower() not in _OPTIMIZERS:
        raise ValueError(
            f"name {name!r} is not an optimizer; available: {', '.join(get_available_optimizers())}"
        )
    return _OPTIMIZERS[name.lower()](params, **kwargs)
