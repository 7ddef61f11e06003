"""DTensor parameters: the cases of sharded_cases.py and
sharded_checkpoints.py, with gloo on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharded_run
import shared_tools
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.xdist_group("ranks"),
]
RANKS = (3, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    return shared_tools.spawn(sharded_run.run, RANKS, tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks in RANKS for name in sharded_run.cases_of(ranks)]
)
def test_ranks_that_hold_shards(results, name, ranks):
    shared_tools.check_case(results, ranks, name)
