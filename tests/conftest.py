"""Shared by all tests: devices, seeds, the visible skip of tests that need CUDA, threads, hypothesis' profiles.

It also makes `import reference` work: pytest puts the folder of this file on the path.
"""

import gc
import importlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# The same examples in every run; `--hypothesis-profile=nightly` looks for new ones.
settings.register_profile("ci", max_examples=25, derandomize=True, deadline=None, database=None)
settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("ci")

if not torch.cuda.is_available():
    # For each kind of device that may start later, torch.manual_seed keeps the seed with a formatted stack: 1 ms,
    # and each test calls it several times.
    torch.manual_seed = torch.default_generator.manual_seed


def pytest_configure() -> None:
    """Shares the cores out among the workers: threads in excess of cores wait for each other."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the programs that tests start


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    if config.getvalue("dist") != "loadgroup":
        return None
    from unit_scheduling import UnitScheduling

    return UnitScheduling(config, log)


def turn(item: pytest.Item) -> int:
    """What takes long runs first, so that all workers end together.

    First the group that compiles, beside those of processes that wait for each other.
    """
    group = item.get_closest_marker("xdist_group")
    if group is not None:
        return 0 if group.args == ("build",) else 1
    return 2 if item.path.parent.name == "project" else 3


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and collected tests live to the end: the garbage collector, which tests call, skips them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test, of any scope
def pytest_runtest_setup() -> None:
    """Gives each test the same random numbers, in whichever worker and order it runs."""
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Frees optimizers in the frames of caught exceptions, whose hooks every later forward pass would call."""
    gc.collect(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device there is a backend for; the CUDA case is skipped where there is none."""
    return torch.device(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests in their order. Without a GPU, one skipped test stands for all of a file that need one.

    pytest takes 5 ms to skip each of 4,000.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        # As the first step of an optimizer does: 100,000 objects, which are frozen with the others.
        importlib.import_module("torch._dynamo")
    items.sort(key=turn)
    if torch.cuda.is_available():
        return
    left_out: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cuda"):
            left_out.setdefault(item.path, []).append(item)
    for first, *others in left_out.values():
        reason = f"no CUDA device ({1 + len(others)} tests of {first.path.name})"
        first.add_marker(pytest.mark.skip(reason=reason))
    dropped = {item for _, *others in left_out.values() for item in others}
    items[:] = [item for item in items if item not in dropped]
