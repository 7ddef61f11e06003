"""The benchmarks of several GPUs, with two processes on the CPU and tiny models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def lines_of_dry_run(script: str) -> list[str]:
    # One thread: the models are small, and two threads wait for each other on a busy machine.
    run = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--dry-run"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_steps_of_shampoo():
    rows = [line.split() for line in lines_of_dry_run("distributed.py")[1:]]
    assert [row[0] for row in rows] == ["every", "never"]
    assert all(0.3 < float(row[-1]) < 0.7 for row in rows)  # of the state


def test_steps_of_kfac_and_natural_gradient():
    rows = lines_of_dry_run("distributed_curvature.py")[3:]
    assert [row[:36].strip() for row in rows] == [
        "K-FAC, TCov 1, TInv 10",
        "K-FAC, TCov 1, TInv 10, one worker",
        "K-FAC, TCov 10, TInv 100",
        "natural gradient",
        "natural gradient, graphs",
        "natural gradient, every 10",
        "natural gradient, every 10, graphs",
    ]
    assert all(len(row[36:].split()) == 3 for row in rows)
