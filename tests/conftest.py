"""Shared by all tests: devices, the visible skip of tests that need CUDA, threads, hypothesis' profiles.

It also makes `import reference` work: pytest puts the folder of this file on the path.
"""

import os

import pytest
import torch
from hypothesis import settings

# The same examples in every run; `--hypothesis-profile=nightly` looks for new ones.
settings.register_profile("ci", max_examples=25, derandomize=True, deadline=None, database=None)
settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_configure() -> None:
    """Shares the cores out among the workers: threads in excess of cores wait for each other."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the programs that tests start


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device there is a backend for; the CUDA case is skipped where there is none."""
    return torch.device(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
