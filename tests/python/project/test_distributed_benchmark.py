"""The benchmark of several GPUs, with two processes on the CPU and a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "distributed.py"


def test_a_dry_run_writes_all_rows():
    # One thread: the model is small, and two threads wait for each other on a busy machine.
    run = subprocess.run(
        [sys.executable, SCRIPT, "--dry-run"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["every", "never"]
    assert all(0.3 < float(row[-1]) < 0.7 for row in rows)  # of the state
