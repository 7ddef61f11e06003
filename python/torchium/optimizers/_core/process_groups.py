"""Process groups whose ranks share the steps of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

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


class Consolidating:
    """A base of optimizers of which a rank may keep a part of the state."""

    _consolidates = False

    @contextmanager
    def consolidating(self) -> Iterator[None]:
        """A block that all ranks of the ``process_group`` run, in which ``state_dict()`` gathers the state.

        A rank may keep a part of the state alone. Outside of the block ``state_dict()`` then raises an error
        instead of a wait for ranks that may not call it.

        Example:
            >>> with optimizer.consolidating():  # on all ranks
            ...     state = optimizer.state_dict()
            >>> if torch.distributed.get_rank() == 0:
            ...     torch.save(state, "optimizer.pt")
        """
        before, self._consolidates = self._consolidates, True
        try:
            yield
        finally:
            self._consolidates = before
