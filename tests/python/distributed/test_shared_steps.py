"""Several processes share the steps of Shampoo: the cases of shared_cases.py and
shared_failures.py, with gloo on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import shared_run
import shared_tools
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.xdist_group("ranks"),
]
RANKS = (2, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    return shared_tools.spawn(shared_run.run, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks in RANKS for name in shared_run.cases_of(ranks)]
)
def test_ranks_that_share_steps(results, name, ranks):
    shared_tools.check_case(results, ranks, name)


def test_benchmark_of_several_gpus():
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "distributed.py"
    run = subprocess.run(
        [sys.executable, script, "--dry-run"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["every", "never"]
    assert all(0.3 < float(row[-1]) < 0.7 for row in rows)  # of the state
