"""Names, colours and ticks of the benchmarks' plots."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws without a display
from matplotlib import pyplot as plt
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Colours of Okabe and Ito, which colour-blind readers can tell apart.
BLACK, ORANGE, SKY, GREEN = "black", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

# Per optimizer of the convergence benchmark: name, colour and line style.
CURVES = {
    "AdamW": ("AdamW", BLACK, "--"),
    "Muon": ("Muon", ORANGE, "-."),
    "Shampoo-1": ("Shampoo, roots every step", SKY, ":"),
    "Shampoo-10": ("Shampoo, roots every 10 steps", BLUE, "-"),
    "Shampoo-100": ("Shampoo, roots every 100 steps", VERMILION, (0, (5, 1, 1, 1, 1, 1))),
    "SGD": ("SGD with momentum", BLACK, "--"),
    "K-FAC": ("K-FAC", GREEN, "-"),
    "NaturalGradient": ("natural gradient", PURPLE, "-."),
}


def plain_ticks(axis: Axis) -> None:
    """0.01 and 100 instead of powers of ten."""
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: np.format_float_positional(value, 6, trim="-"))
    )


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})
    plt.close(figure)
