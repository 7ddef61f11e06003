"""Runs the cases of shared_cases.py and shared_failures.py in processes."""

from __future__ import annotations

import shared_cases  # noqa: F401  (registers its cases)
import shared_failures  # noqa: F401
from shared_tools import cases_in, run_cases


def cases_of(ranks: int) -> list[str]:
    """All with three ranks; with two those whose work is shared out in another way."""
    few = ("equals_one_process", "groups_and_options_change", "all_ranks_skip_and_raise_together")
    return cases_in("shared_cases", "shared_failures") if ranks > 2 else [*few]


def run(rank: int, ranks: int, folder: str) -> None:
    run_cases(rank, ranks, folder, cases_of(ranks))
