"""Several processes share the steps of Shampoo: the cases of shared_cases.py and
shared_failures.py, with gloo on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import shared_run
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.xdist_group("ranks"),
]
RANKS = (2, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """One group of processes per size runs all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    # MKL's products then do not depend on the alignment of a matrix, which differs in another batch.
    with mock.patch.dict(os.environ, {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}):
        groups = [
            torch.multiprocessing.spawn(
                shared_run.run, (ranks, str(folder)), nprocs=ranks, join=False
            )
            for ranks in RANKS
        ]
        for group in groups:
            while not group.join(timeout=120):
                pass
    return folder


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks in RANKS for name in shared_run.cases_of(ranks)]
)
def test_ranks_that_share_steps(results, name, ranks):
    failures = []
    for rank in range(ranks):
        file = results / f"{ranks}.{name}.{rank}"
        text = file.read_text() if file.exists() else "did not run: an earlier case failed"
        if text:
            failures.append(f"rank {rank}: {text}")
    assert not failures, "\n".join(failures)


def test_benchmark_of_several_gpus():
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "distributed.py"
    run = subprocess.run(
        [sys.executable, script, "--dry-run"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["every", "never"]
    assert all(0.3 < float(row[-1]) < 0.7 for row in rows)  # of the state
