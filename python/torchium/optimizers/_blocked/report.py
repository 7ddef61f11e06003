"""The rule of each parameter in Shampoo."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ParameterReport:
    """How Shampoo treats one parameter.

    Attributes:
        name: its name, or ``"parameter 1 of group 0"`` if the optimizer was given no names.
        shape: its shape.
        group: its parameter group.
        rule: ``"preconditioned"`` (by the roots of its blocks), ``"diagonal"``, ``"adam"``,
            ``"rmsprop"`` or ``"adagrad"`` (the direction of the grafted method itself), or
            ``"none"`` for one that requires no gradient and has no state.
        detail: the blocks and the exponent of the roots, or why no matrices precondition it.
        state_bytes: bytes of its state; before its first step, of its future state.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    rule: str
    detail: str
    state_bytes: int


@dataclass(frozen=True)
class ShampooReport:
    """How Shampoo treats each parameter; ``print(report)`` shows a table."""

    parameters: tuple[ParameterReport, ...]
    table: str = field(repr=False)

    def __str__(self) -> str:
        return self.table
