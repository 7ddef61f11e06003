"""Distributed Shampoo's constructor for torchium's Shampoo."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from ..optimizers._blocked.sharing import Sharing
from ..optimizers._core.parameters import check_params
from ..optimizers.shampoo import Shampoo
from ._configs import RUNTIME, read, read_distributed, refuse
from ._options import shampoo_options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Options that a parameter group may hold. `peak_lr` is an option of groups alone.
_GROUP_OPTIONS = (
    *("lr", "betas", "beta3", "epsilon", "weight_decay", "peak_lr", "weight_decay_type"),
    *("max_preconditioner_dim", "precondition_frequency", "start_preconditioning_step"),
    *("use_bias_correction", "iterate_averaging_config", "grafting_config", "use_pin_memory"),
    *("distributed_config", "preconditioner_config"),
)


class DistributedShampoo(Shampoo):
    """:class:`Shampoo` with the constructor of Distributed Shampoo.

    Takes the arguments of ``DistributedShampoo`` in https://github.com/facebookresearch/optimizers, at
    commit f606606, and its configuration objects, which are recognised by the names of their classes. Its
    package need not be installed. Parameters then follow its trajectories
    (``tests/python/blocked/test_compat_distributed_shampoo.py``), except that

    - roots are also computed in earlier steps, if ``precondition_frequency`` is above 1: as in
      :class:`Shampoo`, from ``start_preconditioning_step`` on, while these steps are closer together;
    - every parameter counts its own steps, and a gradient that is not finite skips the step.

    Everything else, and ``param_groups`` and checkpoints, are those of :class:`Shampoo`. Checkpoints of
    Distributed Shampoo cannot be loaded. What Shampoo cannot reproduce is refused; ``docs/migration.md``
    lists it.

    Args:
        params (iterable): parameters, named parameters or dicts of parameter groups, which may hold all
            options below but the last three, and ``peak_lr``.
        lr (float): learning rate (default: 1e-2).
        betas (tuple of two floats): as in :class:`Shampoo` (default: (0.9, 1.0)).
        beta3 (float): must be -1.0 or ``betas[0]`` (default: -1.0).
        epsilon (float): ``eps``, above 0 (default: 1e-12).
        weight_decay (float): weight decay (default: 0).
        weight_decay_type: ``"L2"``, ``"DECOUPLED"`` or ``"INDEPENDENT"`` (decoupled, divided by the
            ``peak_lr`` of the group or ``lr``), or such a member of ``WeightDecayType``
            (default: "DECOUPLED").
        max_preconditioner_dim (int or math.inf): ``block_size`` (default: 1024).
        precondition_frequency (int): ``update_freq`` (default: 1).
        start_preconditioning_step (int or math.inf): as in :class:`Shampoo`; at least
            ``precondition_frequency``, the value for -1 (default: -1).
        use_bias_correction (bool): must be True, unless ``betas=(0.0, 1.0)`` (default: True).
        iterate_averaging_config: None, or a ``ClassicMomentumConfig`` without dampening (default: None).
        grafting_config: None, or an ``SGDPreconditionerConfig``, ``AdaGradPreconditionerConfig``,
            ``RMSpropPreconditionerConfig`` or ``AdamPreconditionerConfig`` (default: None).
        use_pin_memory, shampoo_pt2_compile_config, concurrency_config: ignored; they do not change results.
        distributed_config: a ``SingleDeviceDistributedConfig``; a ``DDPDistributedConfig``, whose ranks
            share the step as those of a ``process_group``; or, for parameters of ``fully_shard``, a
            ``FullyShardDistributedConfig`` or ``HybridShardDistributedConfig`` that assigns whole
            parameters (default: None, the first).
        preconditioner_config: a ``RootInvShampooPreconditionerConfig`` or
            ``EigendecomposedShampooPreconditionerConfig``; for a direction without matrices, one of
            those of ``grafting_config`` (default: None, the first).
        shampoo_runtime_config: ``eager_nan_check`` must be False (default: None).

    Raises:
        ValueError: a configuration object, attribute or value that Shampoo cannot reproduce, or a value
            out of its range. Nothing is changed.

    Example:
        >>> optimizer = torchium.compat.DistributedShampoo(
        ...     torch.nn.Linear(64, 64).parameters(), lr=0.1, betas=(0.9, 0.99), epsilon=1e-6
        ... )
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 1.0),
        beta3: float = -1.0,
        epsilon: float = 1e-12,
        weight_decay: float = 0.0,
        weight_decay_type: Any = "DECOUPLED",
        max_preconditioner_dim: int | float = 1024,
        precondition_frequency: int = 1,
        start_preconditioning_step: int = -1,
        use_bias_correction: bool = True,
        iterate_averaging_config: Any = None,
        grafting_config: Any = None,
        use_pin_memory: bool = False,
        shampoo_pt2_compile_config: Any = None,
        distributed_config: Any = None,
        preconditioner_config: Any = None,
        shampoo_runtime_config: Any = None,
        concurrency_config: Any = None,
    ) -> None:
        given = {**locals(), "peak_lr": lr}
        theirs = {name: given[name] for name in _GROUP_OPTIONS}
        _check_runtime(shampoo_runtime_config)
        defaults = shampoo_options(theirs)
        theirs_of = [{**theirs, **group} for group in _groups(params)]
        groups = [_own_group(index, group) for index, group in enumerate(theirs_of)]
        sharing = _sharing([group["distributed_config"] for group in theirs_of])
        super().__init__(groups, lr, **defaults, **sharing)

    def _check_saved_groups(self, state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        if any("epsilon" in group for group in groups):
            raise ValueError(
                "state_dict is one of Distributed Shampoo, whose state cannot be loaded; load the "
                "parameters alone and warm the learning rate up again"
            )
        super()._check_saved_groups(state_dict, groups)


def _groups(params: Any) -> list[dict[str, Any]]:
    """Parameter groups, whose parameters can be gone through more than once."""
    check_params(params, DistributedShampoo.__name__)
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of tensors or dicts, got a tensor")
    entries = list(params)
    has_groups = not entries or isinstance(entries[0], dict)
    groups = entries if has_groups else [{"params": entries}]
    return [{**group, "params": _reusable(group["params"])} for group in groups]


def _reusable(params: Any) -> Any:
    """As given, unless it is an iterator."""
    return params if isinstance(params, (Tensor, set, list, tuple)) else list(params)


def _own_group(index: int, theirs: dict[str, Any]) -> dict[str, Any]:
    """The group with Shampoo's options; keys of other code are kept."""
    foreign = {k: v for k, v in theirs.items() if k not in _GROUP_OPTIONS}
    wrong = sorted(foreign.keys() & set(Shampoo._OPTIONS.names))
    if wrong:
        raise ValueError(
            f"{wrong[0]}={foreign[wrong[0]]!r} of group {index} is an option of torchium.Shampoo; "
            "give that of DistributedShampoo"
        )
    params = _with_shape(theirs["params"])
    return {**foreign, "lr": theirs["lr"], **shampoo_options(theirs, params)}


def _with_shape(params: Any) -> list[Tensor]:
    """The parameters that are not lazy, without names."""
    entries = [params] if isinstance(params, Tensor) else params
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    return [p for p in tensors if not is_lazy(p)]


def _check_runtime(config: Any) -> None:
    if config is None:
        return
    if read("shampoo_runtime_config", config, RUNTIME).values["eager_nan_check"]:
        name = "shampoo_runtime_config.eager_nan_check"
        refuse(name, True, "use False: a gradient that is not finite skips the step")


def _sharing(configs: Iterable[Any]) -> dict[str, Any]:
    """``process_group`` and ``comm_dtype``, which all groups have the same.

    Sharded parameters need no group: their meshes have one.
    """
    argument = "distributed_config"
    shared: set[tuple[Any, Any] | None] = set()
    for config in configs:
        name, values = read_distributed(config)
        if name == "SingleDeviceDistributedConfig":
            shared.add(None)
            continue
        if values.get("communicate_params"):
            refuse(f"{argument}.communicate_params", True, "use False: directions travel")
        is_sharded = "param_assignment_strategy" in values
        ranks = None if is_sharded else values["num_trainers_per_group"]
        shared.add((values.get("communication_dtype", torch.float32), ranks))
    if len(shared) > 1:
        raise ValueError(f"{argument} must share the step of all parameter groups in the same way")
    common = shared.pop() if shared else None
    if common is None:
        return {}
    dtype, ranks = common
    try:
        Sharing.of(None, dtype, 1)
    except ValueError as error:
        message = str(error).replace("comm_dtype", f"{argument}.communication_dtype", 1)
        raise ValueError(message) from None
    group = None if ranks is None else _process_group(ranks)
    return {"process_group": group, "comm_dtype": dtype}


def _process_group(ranks: Any) -> ProcessGroup | None:
    """The group of ``ranks`` neighbours that this process belongs to; -1: all."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(
            "distributed_config=DDPDistributedConfig needs a process group: call "
            "torch.distributed.init_process_group() first"
        )
    world = distributed.get_world_size()
    if ranks in (-1, world):
        return distributed.group.WORLD
    if not isinstance(ranks, int) or ranks < 1 or world % ranks:
        raise ValueError(
            "distributed_config.num_trainers_per_group must be -1 or divide the number of processes, "
            f"{world}, got {ranks!r}"
        )
    own: ProcessGroup = distributed.new_subgroups(group_size=ranks)[0]
    return own
