"""How much memory an optimizer takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from torch import Tensor

from .parameters import State
from .tables import aligned

# Keys of the state of a parameter, without the number of a slot -> the kind that they count as.
_KINDS = {
    "statistics": "statistics",
    "roots": "roots",
    "exp_avg": "averages",
    "grafting_second_moment": "grafting_second_moments",
    "momentum_buffer": "momentum_buffers",
    "diagonal": "diagonals",
    "root_failures": "counters",
    "step": "counters",
    "exp_avg_start": "counters",
    "grafting_second_moment_start": "counters",
}


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

    def __add__(self, other: StateMemory) -> StateMemory:
        sums = {k.name: getattr(self, k.name) + getattr(other, k.name) for k in fields(self)}
        return StateMemory(**sums)


@dataclass(frozen=True)
class GroupMemory:
    """Memory of a parameter group, or of all.

    Attributes:
        elements: numbers in the parameters that are counted.
        parameters: bytes of these parameters.
        state: bytes of their state.
        graphs: bytes of scratch memory that captured steps keep.
    """

    elements: int
    parameters: int
    state: StateMemory
    graphs: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """Memory of an optimizer; ``print(report)`` shows a table with one column a group."""

    groups: tuple[GroupMemory, ...]

    @property
    def total(self) -> GroupMemory:
        """Of all groups together."""
        return GroupMemory(
            sum(group.elements for group in self.groups),
            sum(group.parameters for group in self.groups),
            sum((group.state for group in self.groups), StateMemory()),
            sum(group.graphs for group in self.groups),
        )

    def __str__(self) -> str:
        columns = {f"group {i}": group for i, group in enumerate(self.groups)}
        columns["total"] = self.total

        def line(name: str, bytes_of: Callable[[GroupMemory], int]) -> list[str]:
            return [name, *(f"{bytes_of(group):,}" for group in columns.values())]

        table = [
            ["bytes", *columns],
            line("parameters", lambda g: g.parameters),
            *(
                line(kind.name.replace("_", " "), lambda g, k=kind.name: getattr(g.state, k))  # type: ignore[misc]
                for kind in fields(StateMemory)
            ),
            line("state", lambda g: g.state.total),
            line("graphs", lambda g: g.graphs),
            [
                "state, bytes a number",
                *(
                    f"{g.state.total / g.elements:.1f}" if g.elements else "-"
                    for g in columns.values()
                ),
            ],
        ]
        return aligned(table, left=1)


def state_memory(states: Iterable[State]) -> StateMemory:
    """Bytes of the tensors in the states of parameters."""
    counts: dict[str, int] = {}
    for state in states:
        for key, value in state.items():
            kind = _KINDS.get(key.split(".")[0])
            if kind is not None and isinstance(value, Tensor):
                counts[kind] = counts.get(kind, 0) + value.nbytes
    return StateMemory(**counts)
