"""A row of the table of phases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PhaseCost:
    """What a phase took.

    Attributes:
        name: without the prefix ``torchium::``; ``"other"``: outside all phases.
        calls: how often it began.
        seconds: of its kernels, or on a CPU of its operators.
        bytes: that its operators and kernels read or write: a lower bound.
        flops: floating point operations of its matrix products: a lower bound.
        counted: the share of ``seconds`` that bytes and flops belong to, 0 to 1.
        limit: the share of the measured limit that it reaches at least: the seconds that the device
            needs for its bytes or its flops, whichever takes longer, by ``seconds``.
        bound: which of the two: ``"bandwidth"`` or ``"arithmetic"``; ``""``: nothing was counted.
    """

    name: str
    calls: int
    seconds: float
    bytes: int
    flops: int
    counted: float
    limit: float
    bound: str
