"""Draw the roofline of inverse roots from a result of benchmarks/roots.py.

python benchmarks/roots_roofline.py benchmarks/results/roots_h200.md docs/images/roots-roofline.png
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws without a display
from matplotlib import pyplot as plt

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


def draw(text: str, path: Path) -> None:
    memory, peak, points = read(text)
    figure, axes = plt.subplots(figsize=(7, 4.2))
    every = [intensity for of_method in points.values() for _, intensity, _ in of_method]
    left, right = min(every) / 3, max(every) * 3
    ridge = 1e3 * peak / memory  # operations per byte
    axes.plot(
        [left, ridge, max(right, 3 * ridge)],
        [left * memory / 1e3, peak, peak],
        color="black",
        linewidth=1,
    )
    axes.annotate(f"fp16 product, {peak:.3g} TFLOP/s", (ridge, 1.1 * peak), fontsize=8)
    axes.annotate(
        f"memory, {memory:.0f} GB/s",
        (1.3 * left, 1.6 * left * memory / 1e3),
        fontsize=8,
    )
    for marker, (method, of_method) in zip("osd^v", points.items(), strict=False):
        orders, intensities, rates = zip(*of_method, strict=True)
        axes.plot(intensities, rates, marker, label=method)
        for n, intensity, rate in zip(orders, intensities, rates, strict=True):
            axes.annotate(
                str(n), (intensity, rate), (4, -9), textcoords="offset points", fontsize=7
            )
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axes.set_ylim(top=3 * peak)
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, loc="lower right")
    axes.set_title("Inverse fourth roots by their order n")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]).read_text(), Path(sys.argv[2]))
