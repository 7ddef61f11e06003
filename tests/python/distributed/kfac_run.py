"""Runs the cases of kfac_cases.py and kfac_failures.py in processes."""

from __future__ import annotations

import kfac_cases  # noqa: F401  (registers its cases)
import kfac_failures  # noqa: F401
from shared_tools import cases_in, run_cases


def cases_of(ranks: int) -> list[str]:
    """All with three ranks; with two those whose work is shared out in another way."""
    few = ["kfac_equals_one_process", "unequal_batches", "workers_alone_keep_inverses"]
    return cases_in("kfac_cases", "kfac_failures") if ranks > 2 else few


def run(rank: int, ranks: int, folder: str) -> None:
    run_cases(rank, ranks, folder, cases_of(ranks))
