"""The memory of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class StateMemory:
    """Bytes of the state of an optimizer, by kind.

    Attributes:
        statistics: second moments of the modes of each block.
        roots: the preconditioners in use.
        averages: averages of the gradients.
        grafting_second_moments: second moments of the grafted method.
        momentum_buffers: momentum of the preconditioned directions.
        diagonals: diagonal statistics of the parameters of order 0 and 1.
        counters: step counts and counts of failed roots.
    """

    statistics: int = 0
    roots: int = 0
    averages: int = 0
    grafting_second_moments: int = 0
    momentum_buffers: int = 0
    diagonals: int = 0
    counters: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(getattr(self, kind.name) for kind in fields(self))


@dataclass(frozen=True)
class GroupMemory:
    """Memory of a parameter group, or of all.

    Attributes:
        elements: number of elements of the parameters that are counted.
        parameters: bytes of these parameters.
        state: bytes of their state.
        graphs: bytes of scratch memory of captured steps.
    """

    elements: int
    parameters: int
    state: StateMemory
    graphs: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """Memory of an optimizer; ``print(report)`` shows a table with one column per group.

    Attributes:
        groups: one entry per parameter group.
        total: all groups together.
    """

    groups: tuple[GroupMemory, ...]
    total: GroupMemory
    table: str = field(repr=False)

    def __str__(self) -> str:
        return self.table
