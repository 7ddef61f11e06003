"""torchrun restarts a run after the death of a rank, on fewer ranks, from the last checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

STEPS, DEATH, RANKS = 5, 2, 3
SCRIPT = Path(__file__).with_name("elastic_training.py")


def start_torchrun(
    folder: Path, output: Path, ranks: int, **environment: str
) -> subprocess.Popen[str]:
    """One of at most two hosts."""
    options = {
        "nnodes": "1:2",
        "nproc-per-node": ranks,
        "max-restarts": 5,
        "monitor-interval": 0.2,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": folder / "rendezvous",
        "rdzv-id": "elastic",
        "rdzv-conf": "store_type=file,last_call_timeout=3,keep_alive_interval=1,join_timeout=60",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, SCRIPT, folder, STEPS, RANKS]
    path = os.pathsep.join(p for p in sys.path if p)
    own = {
        "MKL_CBWR": "COMPATIBLE",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        # Workers of a new round would find addresses of the last one in a common store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **own, **environment},
        stdout=output.open("w"),
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.xdist_group("ranks")
def test_fewer_ranks_resume_after_a_death(tmp_path):
    output = tmp_path / "output"
    survivor = start_torchrun(tmp_path, output, RANKS - 1)
    victim = start_torchrun(tmp_path, tmp_path / "victim", 1, DIES_AT_STEP=str(DEATH))
    try:
        survivor.wait(timeout=200)
    finally:
        survivor.terminate()  # its processes too
        victim.kill()
    assert victim.wait() == -signal.SIGKILL
    assert survivor.returncode == 0, output.read_text()
    steps = [tuple(map(int, line.split())) for line in (tmp_path / "log").read_text().splitlines()]
    assert steps == [(step, RANKS if step < DEATH else RANKS - 1) for step in range(STEPS)]
    for actual, expected in zip(*torch.load(tmp_path / "values.pt"), strict=True):
        assert torch.equal(actual, expected)
