"""The benchmarks of per-sample quantities and of curvature steps, on the CPU with tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_script import run_script

pytest.importorskip("tabulate")

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
METHODS = 13


def test_a_tiny_run_measures_every_method() -> None:
    pytest.importorskip("opacus")
    done = run_script(FOLDER / "curvature.py", "--device", "cpu", "--tiny", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    times = [float(line.split("|")[2]) for line in rows if line.split("|")[2].strip()[:1].isdigit()]
    assert len(times) == 2 * METHODS
    assert min(times) > 0


def test_a_tiny_run_checks_every_step_of_ours() -> None:
    done = run_script(FOLDER / "curvature_step.py", "--device", "cpu", "--tiny")
    assert done.returncode == 0, done.stderr
    spikes = {
        line.split(":")[0].strip("- ") for line in done.stdout.splitlines() if "/ median" in line
    }
    assert any(spike.endswith("natural gradient, cg") for spike in spikes)
    assert any(spike.endswith("inverse_free, T 10") for spike in spikes)
    assert not any("package" in spike or "loop" in spike for spike in spikes)
    for limit in ("2.5", "12.5"):
        assert f"ms beyond forward + backward / {limit}" in done.stdout
