"""Keywords, and keys of parameter groups, that an optimizer does not know."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..._callers import users_stacklevel

# Of the optimizers of torch.optim, but for those that change no result.
_HYPERPARAMETERS = frozenset(
    [
        "weight_decay",
        "decoupled_weight_decay",
        "momentum",
        "dampening",
        "nesterov",
        "betas",
        "eps",
        "amsgrad",
        "maximize",
        "differentiable",
        "alpha",
        "centered",
        "lr_decay",
        "momentum_decay",
        "rho",
    ]
)
_REMEDIES = {
    "weight_decay": "remove it, or multiply the parameters by 1 - lr * weight_decay before each step"
}


# How other optimizers call it.
_SYNONYMS = {"learning_rate": "lr"}
_IMPLEMENTATION = dict.fromkeys(
    ("foreach", "fused"), "remove it: it chooses how PyTorch runs its own steps"
)


def with_known_keywords(caller: str, init: Callable[..., None]) -> Callable[..., None]:
    """The constructor, with an error for unknown keywords that says which one may be meant."""
    parameters = inspect.signature(init).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return init

    @functools.wraps(init)
    def checked(*args: Any, **keywords: Any) -> None:
        for name in keywords:
            if name not in parameters:
                raise unexpected_keyword(caller, name, parameters, _IMPLEMENTATION.get(name, ""))
        init(*args, **keywords)

    return checked


def unexpected_keyword(caller: str, name: str, known: Iterable[str], remedy: str = "") -> TypeError:
    """The error for a keyword that ``caller`` does not have."""
    if not remedy:
        meant = _closest(_SYNONYMS.get(name, name), known, cutoff=0.75)
        remedy = f"did you mean {meant!r}?" if meant else ""
    text = f"{caller}() got an unexpected keyword argument {name!r}"
    return TypeError(f"{text}; {remedy}" if remedy else text)


def warn_of_ignored(
    optimizer: str, groups: list[dict[str, Any]], options: tuple[str, ...], *, is_alone: bool
) -> None:
    """Warns of keys of the last group that look like options, once for each key.

    As in PyTorch, a group may have any other keys. ``is_alone``: no other optimizer reads the group.
    """
    *earlier, group = groups
    for key in [k for k in group if k not in options and k != "lr"]:
        reason = _why_ignored(key, group, options, is_alone)
        if reason and not any(_why_ignored(key, each, options, is_alone) for each in earlier):
            warnings.warn(
                f"{optimizer} ignores {key}={group[key]!r} of group {len(earlier)}; {reason}",
                stacklevel=users_stacklevel(),
            )


def _why_ignored(
    key: object, group: Mapping[str, Any], options: tuple[str, ...], is_alone: bool
) -> str:
    """What to do about a key that should not be ignored; empty: nothing."""
    if not isinstance(key, str) or key not in group:
        return ""
    if key in _HYPERPARAMETERS:
        has_effect = isinstance(group[key], (numbers.Real, tuple, list)) and bool(group[key])
        return _REMEDIES.get(key, "remove it") if has_effect and is_alone else ""
    meant = _closest(key, options)
    return f"did you mean {meant!r}?" if meant else ""


def _closest(name: str, known: Iterable[str], *, cutoff: float = 0.85) -> str | None:
    """The known name of which this may be a misspelling. Keys of schedulers, as max_momentum, are not so close."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None
