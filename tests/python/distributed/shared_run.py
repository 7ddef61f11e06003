"""Runs the cases of shared_cases.py and shared_failures.py in processes."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta
from pathlib import Path

import shared_cases  # noqa: F401  (registers its cases)
import shared_failures  # noqa: F401
import torch.distributed as dist
from shared_tools import CASES


def cases_of(ranks: int) -> list[str]:
    """All with three ranks; with two those whose work is shared out in another way."""
    few = ("equals_one_process", "groups_and_options_change", "all_ranks_skip_and_raise_together")
    return [*CASES] if ranks > 2 else [*few]


def run(rank: int, ranks: int, folder: str) -> None:
    """All cases, in one process of a group; writes the traceback of each that fails."""
    os.environ["SHARED_STEPS_FOLDER"] = folder
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=20),
    )
    for name in cases_of(ranks):
        failure = ""
        try:
            CASES[name](ranks)
        except BaseException:
            failure = traceback.format_exc()
        Path(folder, f"{ranks}.{name}.{rank}").write_text(failure)
        if failure:  # the others may be at another place: they fail too
            break
    dist.destroy_process_group()
