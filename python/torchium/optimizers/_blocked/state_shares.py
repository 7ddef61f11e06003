"""State of which each rank keeps a share, for ``torch.distributed.checkpoint``: a block is saved by its owner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.parameters import State

_ATEN: Any = torch.ops.aten
# Counts, which a rank without blocks may lack.
_STARTS = {"exp_avg_start", "grafting_second_moment_start"}
_ON_SHARE = (_ATEN.detach.default, _ATEN.clone.default, _ATEN._to_copy.default)


class Place(NamedTuple):
    """A rectangle of the whole tensor, and where a share has its elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int  # of its block, in the first dimension of the share
    block: tuple[int, ...]  # sizes of the block
    inside: tuple[tuple[int, int], ...] = ()  # first index and length in each dimension; empty: all

    def of(self, share: Tensor) -> Tensor:
        rows = math.prod(self.block) // math.prod(share.shape[1:])
        part = share.narrow(0, self.begin, rows).view(self.block)
        for dim, (first, length) in enumerate(self.inside):
            part = part.narrow(dim, first, length)
        return part.view(self.sizes)


class StateShare(Tensor):
    """A rank's share of a tensor of state.

    It has the shape of the whole tensor, and the values that this rank keeps; it refuses all operations but
    copies. ``torch.distributed.checkpoint`` saves and loads each of the ``places``.
    """

    share: Tensor
    places: tuple[Place, ...]
    owners: tuple[int, ...]  # of the blocks of the parameter

    @staticmethod
    def __new__(
        cls, size: torch.Size, share: Tensor, places: tuple[Place, ...], owners: tuple[int, ...]
    ) -> StateShare:
        make: Any = Tensor._make_wrapper_subclass
        self: StateShare = make(cls, size, dtype=share.dtype, device=share.device)
        self.share, self.places, self.owners = share, places, owners
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StateShare(shape={list(self.shape)}, share={list(self.share.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a rank's share of state is saved by torch.distributed.checkpoint alone; for torch.save call "
            "state_dict() outside of `with optimizer.sharding():`"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own: StateShare = args[0]
        kwargs = kwargs or {}
        if func is _ATEN.new_empty.default and tuple(args[1]) == tuple(own.shape):
            share = func(own.share, own.share.shape, **kwargs)
        elif func in _ON_SHARE:
            share = func(own.share, *args[1:], **kwargs)
        else:
            raise NotImplementedError(
                f"{func} of a rank's share of state; outside of `with optimizer.sharding():` state_dict() "
                "has whole tensors"
            )
        return cls(own.shape, share, own.places, own.owners)

    # ---- the protocol of torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint import metadata, planner

        properties = metadata.TensorProperties.create_from_tensor(self.share)
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=chunk, properties=properties, size=self.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(place.offsets), torch.Size(place.sizes))
            for place in self.places
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(p for p in self.places if p.offsets == tuple(index.offset)).of(self.share)


class Block(NamedTuple):
    """A block that this rank owns."""

    slot: int  # of its first matrix; -1: none
    matrix: int  # its place in its slots
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def state_shares(
    whole: State, share: State, dims: list[int], blocks: list[list[int]], owners: list[int]
) -> State:
    """The tensors of a state dict.

    Args:
        whole: the whole state without values: on the device "meta", but for counts.
        share: what this rank has of it.
        dims: shape of the parameter, merged as its blocks are cut.
        blocks: slot, matrix, offsets and sizes of each block of this rank, in the order of the share.
        owners: of all blocks.
    """
    own = [
        Block(b[0], b[1], tuple(b[2 : 2 + len(dims)]), tuple(b[2 + len(dims) :])) for b in blocks
    ]
    result: State = {}
    for key, frame in whole.items():
        if not frame.is_meta:
            result[key] = frame
        elif frame.numel() == 0:
            result[key] = share[key].new_empty(frame.shape)
        else:
            list_name, _, slot = key.rpartition(".")
            places = (
                _matrices(own, int(slot), frame.shape[1:])
                if list_name
                else _elements(own, frame.shape, dims)
            )
            # A rank without blocks may lack what the options no longer need.
            part = share[key] if key in share else share["step"].new_empty(0, dtype=frame.dtype)
            result[key] = StateShare(frame.shape, part, tuple(places), tuple(owners))
    return result


def _matrices(blocks: list[Block], slot: int, sizes: Sequence[int]) -> list[Place]:
    rows = [b.matrix for b in blocks if 0 <= b.slot <= slot < b.slot + len(b.sizes)]
    zeros = (0,) * len(sizes)
    return [
        Place((matrix, *zeros), (1, *sizes), row, (1, *sizes)) for row, matrix in enumerate(rows)
    ]


def _elements(blocks: list[Block], shape: Sequence[int], dims: list[int]) -> list[Place]:
    merged = _merged_dims(shape, dims)
    places = []
    begin = 0
    for block in blocks:
        ranges = zip(merged, block.offsets, block.sizes, strict=True)
        parts = [_rectangles(of, first, first + length) for of, first, length in ranges]
        for combination in product(*parts):
            inside = tuple(
                (rectangle.begin - first, math.prod(rectangle.sizes))
                for rectangle, first in zip(combination, block.offsets, strict=True)
            )
            offsets = tuple(i for rectangle in combination for i in rectangle.offsets)
            sizes = tuple(n for rectangle in combination for n in rectangle.sizes)
            places.append(Place(offsets, sizes, begin, block.sizes, inside))
        begin += math.prod(block.sizes)
    return places


def _merged_dims(shape: Sequence[int], dims: list[int]) -> list[tuple[int, ...]]:
    """The dimensions of ``shape`` that each of ``dims`` merges (``src/distributed/sources.cpp``)."""
    result = []
    at = 0
    for length in dims:
        first = at
        while at < len(shape) and (math.prod(shape[first:at]) < length or shape[at] == 1):
            at += 1
        result.append(tuple(shape[first:at]))
    return result


class _Rectangle(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int  # in the flat tensor


def _rectangles(shape: tuple[int, ...], begin: int, end: int) -> list[_Rectangle]:
    """Elements ``begin`` to ``end`` of a flat tensor as rectangles of the tensor, in order."""
    if not shape:
        return [_Rectangle((), (), 0)]
    row = math.prod(shape[1:])
    result = []
    at = begin
    while at < end:
        first = at // row
        if at % row == 0 and end - at >= row:  # whole rows
            last = end // row
            zeros = (0,) * (len(shape) - 1)
            result.append(_Rectangle((first, *zeros), (last - first, *shape[1:]), at))
            at = last * row
        else:
            until = min(end, (first + 1) * row)
            for part in _rectangles(shape[1:], at - first * row, until - first * row):
                offsets, sizes = (first, *part.offsets), (1, *part.sizes)
                result.append(_Rectangle(offsets, sizes, first * row + part.begin))
            at = until
    return result


def loaded_share(name: str, saved: State, current: State, owners: list[int]) -> State:
    """The share of ``saved``, a state with :class:`StateShare` tensors, copied.

    Raises ValueError if it is not one of the ``current`` state, whose blocks have these owners, or has NaN,
    Inf or a negative count.
    """
    different = {
        key
        for key in (saved.keys() ^ current.keys()) - _STARTS
        if _share_of({**current, **saved}[key]).numel() > 0
    }
    if different:
        raise ValueError(
            f"the shares of the state of {name} and its state differ in {', '.join(sorted(different))}; "
            "load into a state dict that this optimizer has made with its present options"
        )
    result = {}
    for key, value in saved.items():
        own = current.get("step" if key in _STARTS else key)
        if own is None:
            continue
        share = _share_of(value)
        if isinstance(value, StateShare) and value.owners != tuple(owners):
            raise ValueError(
                f"{key!r} of {name} is a share of blocks with other owners; load into a state dict "
                "that this optimizer has made"
            )
        if share.shape != own.shape:
            raise ValueError(
                f"{key!r} of {name} has shape {list(share.shape)}, that of this rank has "
                f"{list(own.shape)}; load into a state dict that this optimizer has made"
            )
        torch.ops.torchium.check_numbers(share, key, name)
        result[key] = share.to(own.device, own.dtype, copy=True)
    return result


def _share_of(value: Tensor) -> Tensor:
    return value.share if isinstance(value, StateShare) else value
