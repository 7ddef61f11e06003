"""Runs the cases of natural_gradient_cases.py and natural_gradient_failures.py in processes."""

from __future__ import annotations

import natural_gradient_cases  # noqa: F401  (registers its cases)
import natural_gradient_failures  # noqa: F401
from shared_tools import cases_in, run_cases


def cases_of(ranks: int) -> list[str]:
    """All with three ranks; with two those whose rows are shared out in another way."""
    few = ("equal_batches_are_one_batch", "curvatures_of_the_loss", "given_jacobians")
    modules = ("natural_gradient_cases", "natural_gradient_failures")
    return cases_in(*modules) if ranks > 2 else [*few]


def run(rank: int, ranks: int, folder: str) -> None:
    run_cases(rank, ranks, folder, cases_of(ranks))
