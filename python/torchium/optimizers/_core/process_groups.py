"""Process groups whose ranks share the steps of an optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_name(process_group: ProcessGroup | None) -> str:
    """Its name, which copies and pickles of an optimizer keep; "" for None.

    Raises ValueError for anything else.
    """
    if process_group is None:
        return ""
    if not isinstance(process_group, torch.distributed.ProcessGroup):
        raise ValueError(
            "process_group must be a torch.distributed.ProcessGroup that this process belongs to, "
            f"for example torch.distributed.group.WORLD, got {process_group!r}"
        )
    return str(process_group.group_name)


def group_named(name: str) -> ProcessGroup:
    c10d: Any = torch.distributed.distributed_c10d
    group: ProcessGroup = c10d._resolve_process_group(name)
    return group


def processes() -> int:
    """How many processes train together; 1 without ``torch.distributed``."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


@contextmanager
def set_within(owner: object, flag: str) -> Iterator[None]:
    """A block in which an attribute is True."""
    before = getattr(owner, flag)
    setattr(owner, flag, True)
    try:
        yield
    finally:
        setattr(owner, flag, before)


class Consolidating(Optimizer):
    """Base of optimizers whose state may be distributed over the ranks of a ``process_group``."""

    _PART: ClassVar[str]  # what a rank may keep alone
    _consolidates = False
    # The whole state, and the versions of the parameters that it belongs to.
    _consolidated: tuple[list[int], defaultdict[Tensor, Any]] | None = None

    def consolidating(self) -> AbstractContextManager[None]:
        """A block that all ranks of the ``process_group`` enter, in which ``state_dict()`` gathers the state.

        A rank may keep a part of the state alone. Outside of the block ``state_dict()`` then raises rather
        than wait for ranks that may never call it.

        Example:
            >>> with optimizer.consolidating():  # on all ranks
            ...     state = optimizer.state_dict()
            >>> if torch.distributed.get_rank() == 0:
            ...     torch.save(state, "optimizer.pt")
        """
        return set_within(self, "_consolidates")

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the whole state on one rank, where the next ``state_dict()`` returns it.

        The interface of :class:`torch.distributed.optim.ZeroRedundancyOptimizer`, which Lightning and other
        trainers call. All ranks must call it. After a step or a load ``state_dict()`` raises again. In one
        process nothing needs to be gathered.

        Args:
            to: the rank of the ``process_group`` (of all processes without one) that keeps the state
                (default: 0). On the others ``state_dict()`` raises as without this call.

        Raises:
            ValueError: ``to`` is no rank of the group.
        """
        self._consolidated = None
        with self.consolidating():
            if not self._is_partial():
                return
            ranks = group_named(self._ranks_of_state())
            if not 0 <= to < ranks.size():
                raise ValueError(
                    f"to must be a rank of the process_group, in [0, {ranks.size()}), got {to}"
                )
            state = self._state_to_save()
        if ranks.rank() == to:
            self._consolidated = self._versions(), state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._consolidated = None
        super().load_state_dict(state_dict)

    def _take_consolidated(self) -> defaultdict[Tensor, Any] | None:
        if self._consolidated is None:
            return None
        versions, state = self._consolidated
        self._consolidated = None
        return state if versions == self._versions() else None

    def _versions(self) -> list[int]:
        return [p._version for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`torch.optim.Optimizer.state_dict`: the whole state, which any number of processes can load.

        Where each rank of the ``process_group`` keeps a part of the state alone, all ranks must call it, in a
        block of :meth:`consolidating`, and each gets all of it. With ``DTensor`` parameters, whose
        checkpoints are made by all ranks, they need not enter the block. One rank alone can call it after
        :meth:`consolidate_state_dict`.

        Raises:
            RuntimeError: a rank that keeps a part calls it outside of ``consolidating()``, where it might wait
                forever.
        """
        state = None if self._is_in_block() else self._take_consolidated()
        if state is None:
            state = self._state_of_checkpoint()
        with self._holding(state):
            return super().state_dict()

    def _state_of_checkpoint(self) -> defaultdict[Tensor, Any]:
        is_partial = self._is_partial()
        if is_partial and not self._all_ranks_call():
            raise RuntimeError(
                f"each rank of the process_group keeps {self._PART}, and state_dict() would wait for the "
                "others; call it on all ranks in a block `with optimizer.consolidating():`, and save what it "
                "returns on one"
            )
        return self._state_to_save() if is_partial else self._own_state_to_save()

    @contextmanager
    def _holding(self, state: defaultdict[Tensor, Any]) -> Iterator[None]:
        """A block in which the optimizer has this state."""
        own = self.state
        self.state = state
        try:
            yield
        finally:
            self.state = own

    def _is_in_block(self) -> bool:
        """Of those that all ranks run, and in which all of them gather the state."""
        return self._consolidates

    def _all_ranks_call(self) -> bool:
        return self._is_in_block()

    def _ranks_of_state(self) -> str:
        """The name of the process group."""
        raise NotImplementedError

    def _is_partial(self) -> bool:
        """Whether the state of this rank is not the whole state; the same on all ranks that consolidate."""
        raise NotImplementedError

    def _state_to_save(self) -> defaultdict[Tensor, Any]:
        """The whole state."""
        raise NotImplementedError

    def _own_state_to_save(self) -> defaultdict[Tensor, Any]:
        """The state of this rank, without waiting for others."""
        return self.state
