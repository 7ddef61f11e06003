"""Processes that share the steps of an optimizer: the cases of the modules below."""

from __future__ import annotations

import kfac_cases
import kfac_failures
import natural_gradient_cases
import natural_gradient_failures
import pytest
import runner_cases
import shampoo_cases
import shampoo_checkpoints
import shampoo_failures
import sharded_shampoo_cases
import sharded_shampoo_checkpoints
import torch.distributed as dist
from ranks import CASES, Ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
MODULES = [
    kfac_cases,
    kfac_failures,
    natural_gradient_cases,
    natural_gradient_failures,
    shampoo_cases,
    shampoo_checkpoints,
    shampoo_failures,
    sharded_shampoo_cases,
    sharded_shampoo_checkpoints,
]


def cases() -> list[object]:
    """One group of processes, in one worker, runs all cases of its number of ranks."""
    modules = {module.__name__ for module in MODULES}
    return [
        pytest.param(
            ranks,
            module,
            name,
            id=f"{ranks}-{module}-{name}",
            marks=pytest.mark.xdist_group(f"{ranks} ranks"),
        )
        for (module, name), all_ranks in CASES.items()
        if module in modules
        for ranks in all_ranks
    ]


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """By their numbers of ranks; each starts with its first case."""
    groups = {ranks: Ranks(ranks, tmp_path_factory.mktemp("ranks")) for ranks in (2, 3, 4)}
    yield groups
    for group in groups.values():
        group.stop()


@pytest.mark.parametrize(("ranks", "module", "name"), cases())
def test_on_ranks(groups, ranks, module, name):
    groups[ranks].check(module, name)


@pytest.mark.xdist_group("2 ranks")
def test_a_new_group_follows_a_failure(groups):
    module = runner_cases.__name__
    for failing, text in (
        ("one_rank_raises", "rank 1: .*the last rank"),
        ("one_rank_ends", "rank 1: the process has ended with exit code 3"),
    ):
        with pytest.raises(AssertionError, match=f"(?s)rank 0: .*{text}"):
            groups[2].check(module, failing)
        groups[2].check(module, "all_ranks_meet")
