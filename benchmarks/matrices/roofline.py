"""Draw the roofline of inverse roots from a result of benchmarks/roots.py.

PYTHONPATH=benchmarks python -m matrices.roofline benchmarks/results/roots_h200.md docs/images/roots-roofline.png
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

from shared.plot_style import BLUE, VERMILION, plain_ticks, plt, save

TITLE = "Roofline"  # of the table
NUMBER = r"[-+0-9.e]+"
ROW = re.compile(
    rf"^\| (?P<method>[^|]*), n = (?P<n>\d+) +\| +(?P<intensity>{NUMBER}) +\| +(?P<rate>{NUMBER}) +\|"
)
ROOFS = re.compile(rf"memory (?P<memory>{NUMBER}) GB/s, fp16 (?P<peak>{NUMBER}) TFLOP/s")

# Per method: n, operations per byte, TFLOP/s.
Points = dict[str, list[tuple[int, float, float]]]


def read(text: str) -> tuple[float, float, Points]:
    """Read memory GB/s, tensor-core TFLOP/s, and the points of the table."""
    roofs = ROOFS.search(text)
    if roofs is None:
        raise ValueError("the result names no roofs; make it again with benchmarks/roots.py")
    points: Points = {}
    for line in text.partition(f"## {TITLE}")[2].splitlines():
        if row := ROW.match(line):
            point = (int(row["n"]), float(row["intensity"]), float(row["rate"]))
            points.setdefault(row["method"].strip(), []).append(point)
        elif line.startswith("## "):
            break
    return float(roofs["memory"]), float(roofs["peak"]), points


# Of a method of the table: name, colour and marker.
METHODS = {
    "ours": ("torchium", BLUE, "o"),
    "coupled Newton, fp16, 10 steps": ("coupled Newton, fp16, 10 iterations", VERMILION, "s"),
}


def draw(text: str, path: Path) -> None:
    memory, peak, points = read(text)
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    every = [intensity for of_method in points.values() for _, intensity, _ in of_method]
    left, right = min(every) / 2, 2 * max(every)
    ridge = 1e3 * peak / memory  # operations per byte
    axes.plot(
        [left, ridge, max(right, 3 * ridge)],
        [left * memory / 1e3, peak, peak],
        color="black",
        linewidth=1,
    )
    lowest = min(rate for of_method in points.values() for _, _, rate in of_method)
    axes.set(xscale="log", yscale="log", ylim=(lowest / 2, 3 * peak))
    axes.text(ridge, 1.15 * peak, f"limit of fp16 products, {peak:.0f} TFLOP/s", fontsize=9)
    x, y = 3 * left, 3.5 * left * memory / 1e3
    axes.text(
        *(x, y, f"limit of memory, {memory:.0f} GB/s"),
        fontsize=9,
        rotation=math.degrees(math.atan2(y, x)),  # parallel to the line, on logarithmic axes
        rotation_mode="anchor",
        transform_rotates_text=True,
    )
    for method, of_method in points.items():
        name, colour, marker = METHODS[method]
        orders, intensities, rates = zip(*of_method, strict=True)
        axes.plot(intensities, rates, marker, color=colour, label=name)
        # The two methods' points are close: their numbers are below or on the right.
        side, offset = ("center", (0, -13)) if marker == "o" else ("left", (6, -3))
        for n, intensity, rate in zip(orders, intensities, rates, strict=True):
            axes.annotate(
                *(str(n), (intensity, rate), offset),
                textcoords="offset points",
                ha=side,
                color=colour,
                fontsize=8,
            )
    axes.set(
        xlabel="fp16 operations per byte of memory traffic",
        ylabel="speed (TFLOP/s)",
        title="Inverse fourth roots of n x n matrices; numbers are n",
    )
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
    save(figure, path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]).read_text(), Path(sys.argv[2]))
