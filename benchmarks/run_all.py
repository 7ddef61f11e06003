"""Run all benchmarks that this machine supports, for `make bench`.

Exits with 1 if a target is missed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = (
    "shampoo_cpu.py",
    "host_time.py",
    "kfac_cpu.py",
    "natural_gradient_cpu.py",
    "curvature.py",
    "roots_accuracy.py",
    "roots_cpu.py",
    "linalg.py",
    "operators.py",
)


def main() -> int:
    folder = Path(__file__).resolve().parent
    # Each in its own process, so threads, allocator and caches do not affect the next.
    codes = [
        subprocess.run([sys.executable, str(folder / name), *sys.argv[1:]]).returncode
        for name in BENCHMARKS
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
