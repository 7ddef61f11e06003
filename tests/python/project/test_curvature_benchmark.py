"""The benchmark of per-sample quantities, on the CPU with tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_script import run_script

pytest.importorskip("tabulate")
pytest.importorskip("opacus")

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
METHODS = 13


def test_a_tiny_run_measures_every_method() -> None:
    done = run_script(FOLDER / "curvature.py", "--device", "cpu", "--tiny", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    times = [float(line.split("|")[2]) for line in rows if line.split("|")[2].strip()[:1].isdigit()]
    assert len(times) == 2 * METHODS
    assert min(times) > 0
