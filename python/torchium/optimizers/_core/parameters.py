"""Checks of parameters, and their names in messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..._sharded import is_dtensor, is_flat_shard, local_tensor

State = dict[str, Tensor]  # of one parameter


def parameter_name(index: int, group: dict[str, Any], param: Tensor | None) -> str:
    """The parameter in a message: by its name if the optimizer was given names.

    Searches the group: for all of its parameters, take :func:`parameter_names`.
    """
    position = next((i for i, p in enumerate(group["params"]) if p is param), None)
    if param is None or position is None:
        return f"a parameter of group {index}"
    return _name_at(index, group, position)


def given_name(group: dict[str, Any], position: int) -> str | None:
    """The name that the optimizer was given; None: it has none, or not of a parameter appended by hand."""
    names: list[str] = group.get("param_names") or []
    return names[position] if position < len(names) else None


def parameter_names(index: int, group: dict[str, Any]) -> list[str]:
    """:func:`parameter_name` of each parameter of the group."""
    return [_name_at(index, group, i) for i in range(len(group["params"]))]


def _name_at(index: int, group: dict[str, Any], position: int) -> str:
    name, param = given_name(group, position), group["params"][position]
    label = repr(name) if name else position
    shape = "" if is_lazy(param) else f" (shape {list(param.shape)})"
    return f"parameter {label} of group {index}{shape}"


def check_params(params: object, optimizer: str) -> None:
    """Raises ValueError for a model or an optimizer in place of parameters."""
    if isinstance(params, nn.Module):
        raise ValueError(
            f"{optimizer} takes parameters, not a model, got {type(params).__name__}; pass "
            "model.parameters()"
        )
    if isinstance(params, Optimizer):
        raise ValueError(
            f"params must be parameters, got an optimizer, {type(params).__name__}; pass its "
            "param_groups, or take Shampoo.from_adamw(optimizer) for an AdamW"
        )


def check_parameter(param: Tensor, name: str, *, takes_shards: bool = False) -> None:
    """Raises ValueError for parameters that the optimizers do not support."""
    if takes_shards and is_dtensor(param):
        _check_placements(param, name)
        param = local_tensor(param)
    if is_lazy(param):
        raise ValueError(
            f"{name} is uninitialized, as those of a lazy module are; run a forward pass first"
        )
    if is_dtensor(param):
        raise ValueError(
            f"{name} is a DTensor, which is not supported; optimize the full tensor on each rank, "
            "or use Shampoo, which takes DTensor parameters"
        )
    torch.ops.torchium.check_parameter(param, name)


def check_unsharded(index: int, group: dict[str, Any], params: Iterable[Tensor]) -> None:
    """Raises ValueError for flat shards of FullyShardedDataParallel, which have lost their shape."""
    for param in params:
        if is_flat_shard(param):
            raise ValueError(
                f"{parameter_name(index, group, param)} is a flat shard of FullyShardedDataParallel, "
                "which has lost the shape that preconditioners need; use fully_shard, whose DTensor "
                "parameters Shampoo takes, or train in one process or with DistributedDataParallel"
            )


def _check_placements(param: Any, name: str) -> None:
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(
            f"{name} has the placements {param.placements}; a parameter must be replicated or sharded "
            "in each dimension of its mesh, for example by redistribute()"
        )


def with_own_tensors(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same values, with copies of the tensors."""
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in values.items()}
