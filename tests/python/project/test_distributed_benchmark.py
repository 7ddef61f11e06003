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
    lines = lines_of_dry_run("distributed.py")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    steps = {tuple(row[:2]): row[2:] for row in rows if row[1] in ("every step", "never")}
    assert [*steps] == [
        (layout, roots) for layout in ("replicated", "aligned") for roots in ("every step", "never")
    ]
    for (layout, _), row in steps.items():
        assert 0.3 < float(row[3]) < 0.7  # of the state
        assert (float(row[4]) > 0) == (layout == "replicated")  # bytes
        assert bool(row[-1]) == (layout == "replicated")  # hidden
    # One layer has 12 blocks of order 1024, 3 for each of 4 ranks, which send their directions to 3 others.
    assert ["replicated", "1024", "4", "1", "0", "36", "12"] in rows
    assert ["rows", "512", "4", "1", "5", "5", ""] in rows
    targets = [row for row in rows if row[-1] in ("pass", "MISS")]
    assert len(targets) == 8


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
