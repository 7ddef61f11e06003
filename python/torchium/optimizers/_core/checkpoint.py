"""What a saved state dict must look like, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Container
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from .parameters import State

# State of all optimizers of this package; an entry of a list has its number behind a dot.
_OUR_KEYS = frozenset(torch.ops.torchium.state_keys())


def saved_groups(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the saved parameter groups that name the parameters of ``groups``.

    Options that the checkpoint does not know keep their values.
    """
    if not _is_state_dict(state_dict):
        raise ValueError(
            "state_dict must be a dict with the dict 'state' and the list 'param_groups', as "
            f"state_dict() returns it, got {_describe(state_dict)}"
        )
    if any(isinstance(s, dict) and "exp_avg_sq" in s for s in state_dict["state"].values()):
        raise ValueError(
            "state_dict is a checkpoint of Adam or AdamW (it has 'exp_avg_sq'), whose averages do not "
            "carry over; start this optimizer without it"
        )
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(
            f"state_dict has {len(saved)} parameter groups, the optimizer has {len(groups)}"
        )
    merged = []
    for index, (old, new) in enumerate(zip(groups, saved, strict=True)):
        if len(old["params"]) != len(new["params"]):
            raise ValueError(
                f"parameter group {index} of state_dict has {len(new['params'])} parameters, "
                f"that of the optimizer has {len(old['params'])}"
            )
        options = deepcopy({key: value for key, value in new.items() if key != "params"})
        merged.append({**old, **options, "params": old["params"]})
    _check_order(groups, saved)
    return merged


def _check_order(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """State belongs to positions. Names may differ, as by a prefix, but not change places."""
    if any(isinstance(i, str) for group in saved for i in group["params"]):
        return  # torch.distributed.checkpoint has put the state in order, but not the names
    names, saved_names = (
        [name for group in each for name in group.get("param_names") or []]
        for each in (groups, saved)
    )
    if names == saved_names or sorted(names) != sorted(saved_names):
        return
    name, other = next(pair for pair in zip(names, saved_names, strict=True) if pair[0] != pair[1])
    raise ValueError(
        f"state_dict has the same parameters in another order, {other!r} where the optimizer has "
        f"{name!r}; pass the parameters to the optimizer in the order of the checkpoint"
    )


def saved_states(
    state_dict: dict[str, Any], groups: list[dict[str, Any]]
) -> dict[Tensor, dict[str, Any]]:
    """The saved state of each parameter that has one.

    Entries whose keys are names belong to other code, and are left out.
    """
    ids = (i for group in state_dict["param_groups"] for i in group["params"])
    params = (p for group in groups for p in group["params"])
    by_id = dict(zip(ids, params, strict=True))
    of_params = {key: s for key, s in state_dict["state"].items() if not is_foreign(key, by_id)}
    unknown = [key for key in of_params if key not in by_id]
    if unknown:
        raise ValueError(f"state_dict has state of {unknown[0]!r}, which is in no parameter group")
    malformed = [key for key, state in of_params.items() if not isinstance(state, dict)]
    if malformed:
        raise ValueError(f"state of {malformed[0]!r} in state_dict must be a dict of tensors")
    return {by_id[i]: state for i, state in of_params.items() if state}


def split_state(
    saved: dict[str, Any], device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizers' own state of a parameter, and copies of what other code keeps there."""
    own = {k: v for k, v in saved.items() if not _is_foreign_key(k)}
    foreign = {
        k: v.to(device, copy=True) if isinstance(v, Tensor) else deepcopy(v)
        for k, v in saved.items()
        if _is_foreign_key(k)
    }
    return own, foreign


def own_state(state: dict[str, Any]) -> State:
    """State of a parameter without what other code keeps there."""
    return {key: value for key, value in state.items() if not _is_foreign_key(key)}


def as_tensors(saved: dict[str, Any], name: str) -> State:
    """Saved state of a parameter, of which ``step`` may be a number."""
    tensors = {}
    for key, value in saved.items():
        if key == "step" and isinstance(value, (int, float)):
            value = torch.tensor(value, dtype=torch.float64)
        if not isinstance(value, Tensor):
            raise ValueError(f"{key!r} of {name} must be a dense tensor, got {_describe(value)}")
        tensors[key] = value
    return tensors


def _is_foreign_key(key: object) -> bool:
    return not isinstance(key, str) or key.split(".")[0] not in _OUR_KEYS


def foreign_states(state_dict: dict[str, Any]) -> dict[Any, Any]:
    """Copies of the entries of the saved state that belong to no parameter but to other code."""
    ids = {i for group in state_dict["param_groups"] for i in group["params"]}
    return {k: deepcopy(v) for k, v in state_dict["state"].items() if is_foreign(k, ids)}


def is_foreign(key: object, ids: Container[Any]) -> bool:
    """Whether the entry of a saved state belongs to no parameter: these have numbers."""
    return key not in ids and not isinstance(key, int)


def _is_state_dict(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.layout} tensor of shape {list(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with the keys {list(value)}"
    return f"{type(value).__name__} {value!r}"[:200]
