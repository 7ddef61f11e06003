"""Runs the cases of sharded_cases.py and sharded_checkpoints.py in processes."""

from __future__ import annotations

import sharded_cases  # noqa: F401  (registers its cases)
import sharded_checkpoints  # noqa: F401
from shared_tools import cases_in, run_cases


def cases_of(ranks: int) -> list[str]:
    """All with four ranks; with three, over which no size of the cases is even, the equality."""
    return (
        cases_in("sharded_cases", "sharded_checkpoints")
        if ranks == 4
        else ["shards_equal_one_process"]
    )


def run(rank: int, ranks: int, folder: str) -> None:
    run_cases(rank, ranks, folder, cases_of(ranks))
