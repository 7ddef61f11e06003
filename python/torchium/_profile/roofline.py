"""A roofline plot (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual model")."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .limits import Limits
from .phase_cost import PhaseCost


def check_matplotlib() -> None:
    """Raise ImportError with the remedy if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "profile: roofline needs matplotlib, which is not installed. Run "
            "`pip install matplotlib`, or leave roofline out for the table alone."
        ) from error


def draw_roofline(phases: Sequence[PhaseCost], limits: Limits, device: str, path: Path) -> None:
    """Write a PNG: flops per second over flops per byte, both logarithmic.

    Phases without flops or without bytes have no place in it and are left out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [p for p in phases if p.flops and p.bytes and p.seconds]
    intensities = [p.flops / p.bytes for p in shown]
    ridge = limits.flops / limits.bandwidth
    left, right = min([ridge, *intensities]) / 10, max([ridge, *intensities]) * 10
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.loglog(
        [left, ridge, right],
        [left * limits.bandwidth, limits.flops, limits.flops],
        color="black",
        label="measured limit",
    )
    for phase, intensity in zip(shown, intensities, strict=True):
        rate = phase.flops / phase.seconds
        axes.loglog([intensity], [rate], "o")
        axes.annotate(phase.name, (intensity, rate), textcoords="offset points", xytext=(6, -3))
    axes.set_xlabel("flops per byte (counted)")
    axes.set_ylabel("flops per second (counted)")
    axes.set_title(f"Phases on {device}")
    axes.legend(loc="lower right")
    axes.grid(True, which="major", alpha=0.3)
    figure.savefig(path, format="png", dpi=150)
