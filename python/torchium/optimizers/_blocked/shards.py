"""DTensor parameters, as the plans take them: plain tensors of this rank, and who has which part.

``fully_shard``, tensor parallelism and both together. The plans step an alias of the local tensor, which has
its memory and carries the local gradient during a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from ..._sharded import is_dtensor, local_tensor
from .._core.parameters import parameter_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Shape, sizes of the mesh, strides of its ranks in the group, kind, dimension and split factor of each
# placement, number of ranks (src/distributed/sources.h). Empty: a plain tensor.
Numbers = list[list[int]]


def group_of(groups: list[dict[str, Any]]) -> ProcessGroup | None:
    """The ranks that hold the DTensor parameters; None without any.

    Raises ValueError if they have no process group, or if plain parameters are among them, whose gradients
    may differ between the ranks.
    """
    meshes = [p.device_mesh for group in groups for p in group["params"] if is_dtensor(p)]
    if not meshes:
        return None
    params = [(index, p) for index, group in enumerate(groups) for p in group["params"]]
    for index, param in params:
        if param.requires_grad and not is_dtensor(param):
            raise ValueError(
                f"{parameter_name(index, groups[index], param)} is a plain tensor among DTensor "
                "parameters; make it one too, or, if all ranks have the same gradients of it, pass "
                "process_group"
            )
    mesh: DeviceMesh = max(meshes, key=lambda each: each.size())
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == torch.distributed.get_world_size():
        return torch.distributed.group.WORLD
    raise ValueError(
        f"the parameters lie on a mesh of {mesh.ndim} dimensions and {mesh.size()} of "
        f"{torch.distributed.get_world_size()} ranks, which has no process group of its own; pass "
        "process_group=mesh._flatten().get_group()"
    )


class _Shard:
    """A DTensor parameter, and the alias of its local tensor."""

    __slots__ = ("address", "alias", "local", "param", "placements")

    def __init__(self, param: Any) -> None:
        self.param = param
        self.placements = param.placements
        self.local: Any = None  # as it was last seen, if it is a plain tensor
        self.address = 0
        self.alias = local_tensor(param).detach()

    def follow(self) -> None:
        """The alias becomes one of what the parameter holds now."""
        local = local_tensor(self.param)
        self.local = local if local is self.param._local_tensor else None
        self.address = local.data_ptr()
        if self.alias.data_ptr() != local.data_ptr() or self.alias.shape != local.shape:
            self.alias.data = local
        if self.alias.requires_grad != self.param.requires_grad:
            self.alias.requires_grad_(self.param.requires_grad)

    def take_other_gradient(self, grad: Any) -> Tensor:
        """The local tensor of one that does not share the placements of its parameter."""
        if is_dtensor(grad) and grad.placements != self.placements:
            grad = self.param.grad = grad.redistribute(self.param.device_mesh, self.placements)
        return local_tensor(grad)


class Shards:
    """The local tensors of DTensor parameters."""

    def __init__(self) -> None:
        self._shards: dict[Tensor, _Shard] = {}  # by their parameters
        self._params: dict[Tensor, Tensor] = {}  # by their aliases
        self._numbers: dict[Tensor, Numbers] = {}

    def of(self, param: Tensor) -> Tensor:
        """What the plans take for the parameter: itself, or the alias of its local tensor."""
        shard = self._shards.get(param)
        if shard is None:
            if not is_dtensor(param):
                return param
            shard = self._shards[param] = _Shard(param)
            self._params[shard.alias] = param
        shard.follow()
        return shard.alias

    def param_of(self, tensor: Tensor | None) -> Tensor | None:
        """The reverse of :meth:`of`."""
        return tensor if tensor is None else self._params.get(tensor, tensor)

    def numbers_of(self, param: Tensor, group: ProcessGroup, name: str) -> Numbers:
        """How a DTensor parameter lies on the ranks of the group."""
        if param not in self._numbers:
            self._numbers[param] = _numbers(param, group, name)
        return self._numbers[param]

    # Both run in every step for all parameters: no call per parameter that is not needed.
    def take_gradients(self) -> None:
        """Gives the aliases the gradients of their parameters."""
        for shard in self._shards.values():
            param = shard.param
            grad, local = param.grad, param._local_tensor
            spec = getattr(grad, "_spec", None)  # a plain gradient has none
            if local is not shard.local or local.data_ptr() != shard.address:
                shard.follow()
            if grad is None:
                shard.alias.grad = None
            elif (
                spec and spec.placements is shard.placements and type(grad._local_tensor) is Tensor
            ):
                shard.alias.grad = grad._local_tensor
            else:
                shard.alias.grad = shard.take_other_gradient(grad)

    def end_step(self) -> None:
        """Drops the gradients, which ``zero_grad()`` frees, and marks the parameters as changed for autograd."""
        for alias in self._params:
            alias.grad = None
        torch.autograd.graph.increment_version(self._shards)


def _numbers(param: Any, group: ProcessGroup, name: str) -> Numbers:
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = param.device_mesh
    ranks = torch.distributed.get_process_group_ranks(group)
    sizes = list(mesh.mesh.shape)
    strides = _strides(mesh.mesh, ranks)
    if strides is None:
        raise ValueError(
            f"{name} lies on a mesh of the ranks {mesh.mesh.tolist()}, which are no regular part of the "
            f"ranks {ranks} of the process group; pass a process_group of all ranks of the meshes, in "
            "their order"
        )
    kinds, dims, factors = [], [], []
    for placement in param.placements:
        strided = isinstance(placement, _StridedShard)
        kinds.append(2 if strided else 1 if placement.is_shard() else 0)
        dims.append(0 if placement.is_replicate() else placement.dim % param.dim())
        factors.append(placement.split_factor if strided else 1)
    return [list(param.shape), sizes, strides, kinds, dims, factors, [len(ranks)]]


def _strides(mesh: Tensor, ranks: list[int]) -> list[int] | None:
    """Strides s so that position r of the group is at r / s[m] % size[m] in dimension m; None: there are none."""
    position = {rank: i for i, rank in enumerate(ranks)}
    if any(rank not in position for rank in mesh.flatten().tolist()):
        return None
    places = torch.tensor([position[r] for r in mesh.flatten().tolist()]).view(mesh.shape)
    first = [0] * mesh.ndim
    strides = []
    for m, size in enumerate(mesh.shape):
        second = [*first[:m], 1, *first[m + 1 :]] if size > 1 else first
        strides.append(max(1, int(places[tuple(second)] - places[tuple(first)])))
    for m, (size, stride) in enumerate(zip(mesh.shape, strides, strict=True)):
        shape = [size if d == m else 1 for d in range(mesh.ndim)]
        if not torch.equal(
            places // stride % size, torch.arange(size).view(shape).expand_as(places)
        ):
            return None
    return strides
