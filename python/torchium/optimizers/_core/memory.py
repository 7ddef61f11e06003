"""The memory of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class StateMemory:
    """Bytes of the state of an optimizer, by kind.

    Attributes:
        statistics: second moments of the modes of each block. K-FAC: factors, Fisher blocks of norms, and
            second moments of EKFAC.
        roots: the preconditioners in use. K-FAC: inverses, or eigenvectors and eigenvalues; K and C.
        averages: averages of the gradients. K-FAC: m_K and m_C.
        grafting_second_moments: second moments of the grafted method.
        momentum_buffers: momentum of the preconditioned directions.
        diagonals: diagonal statistics: of Shampoo those of the parameters of order 0 and 1, sums of Adagrad,
            diagonals of the Hessian and averages of their squares of AdaHessian.
        batches: layer calls that NaturalGradient keeps with ``update_freq`` above 1.
        counters: step counts, and counts of updates and of failed roots.
    """

    statistics: int = 0
    roots: int = 0
    averages: int = 0
    grafting_second_moments: int = 0
    momentum_buffers: int = 0
    diagonals: int = 0
    batches: int = 0
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
        workspace: bytes of tensors that a step leaves for later ones besides the state: numbers of kernels,
            factorisations, squares and fp16 parts of roots. Not the layer calls between ``backward()`` and
            ``step()``.
        graphs: bytes of scratch memory of captured steps.
    """

    elements: int
    parameters: int
    state: StateMemory
    workspace: int = 0
    graphs: int = 0


@dataclass(frozen=True)
class ParameterMemory:
    """State of one parameter.

    Attributes:
        name: the one that the optimizer was given, or the place in the groups.
        group: index of its group.
        state: bytes of its state.
    """

    name: str
    group: int
    state: StateMemory


@dataclass(frozen=True)
class MemoryReport:
    """Memory of an optimizer; ``print(report)`` shows a table with one column per group.

    Attributes:
        groups: one entry per parameter group.
        joint: what belongs to no group alone: workspace and captured steps of the optimizers that step all
            groups together.
        total: all groups together.
        parameters: one entry per parameter that is counted. A tensor of several is that of the first.
    """

    groups: tuple[GroupMemory, ...]
    joint: GroupMemory
    total: GroupMemory
    parameters: tuple[ParameterMemory, ...]
    table: str = field(repr=False)

    def __str__(self) -> str:
        return self.table

    @classmethod
    def from_core(
        cls,
        groups: list[dict[str, int]],
        parameters: list[tuple[str, int, dict[str, int]]],
        table: str,
    ) -> MemoryReport:
        """Of what the plans report: groups are followed by ``joint`` and ``total``."""
        *own, joint, total = map(_group_memory, groups)
        states = tuple(
            ParameterMemory(name, group, StateMemory(**state)) for name, group, state in parameters
        )
        return cls(tuple(own), joint, total, states, table)


def _group_memory(numbers: dict[str, int]) -> GroupMemory:
    kinds = [kind.name for kind in fields(StateMemory)]
    state: Any = {kind: numbers[kind] for kind in kinds}
    others: Any = {name: value for name, value in numbers.items() if name not in kinds}
    return GroupMemory(state=StateMemory(**state), **others)
