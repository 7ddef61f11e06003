"""Several processes share the steps of K-FAC: the cases of kfac_cases.py and kfac_failures.py, with
gloo on the CPU."""

from __future__ import annotations

from pathlib import Path

import kfac_run
import pytest
import shared_tools
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.xdist_group("ranks"),
]
RANKS = (2, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    return shared_tools.spawn(kfac_run.run, RANKS, tmp_path_factory.mktemp("kfac"))


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks in RANKS for name in kfac_run.cases_of(ranks)]
)
def test_ranks_that_share_steps_of_kfac(results, name, ranks):
    shared_tools.check_case(results, ranks, name)
