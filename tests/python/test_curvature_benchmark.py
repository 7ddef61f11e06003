"""The benchmark of per-sample quantities, on the CPU with tiny models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tabulate")
pytest.importorskip("opacus")

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
METHODS = 13


def test_a_tiny_run_measures_every_method() -> None:
    command = [sys.executable, str(FOLDER / "curvature.py"), "--device", "cpu", "--tiny"]
    done = subprocess.run([*command, "--rounds", "1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    times = [float(line.split("|")[2]) for line in rows if line.split("|")[2].strip()[:1].isdigit()]
    assert len(times) == 2 * METHODS
    assert min(times) > 0
