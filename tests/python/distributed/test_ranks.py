"""Processes that share the steps of an optimizer: the cases of the modules below."""

from __future__ import annotations

from types import ModuleType

import curvature_on_gpus
import kfac_cases
import kfac_failures
import natural_gradient_cases
import natural_gradient_failures
import pytest
import runner_cases
import shampoo_cases
import shampoo_changes
import shampoo_checkpoints
import shampoo_failures
import shampoo_on_gpus
import shampoo_reshards
import shampoo_scalers
import shampoo_stages
import sharded_shampoo_cases
import sharded_shampoo_checkpoints
import torch
import torch.distributed as dist
from ranks import CASES, GPUS_OF_CASES, WITHOUT_CUDA, Ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
ON_BOTH = [
    kfac_cases,
    kfac_failures,
    natural_gradient_cases,
    natural_gradient_failures,
    shampoo_changes,
    shampoo_reshards,
    shampoo_scalers,
]
ON_CPU = [
    shampoo_cases,
    shampoo_checkpoints,
    shampoo_failures,
    shampoo_stages,
    sharded_shampoo_cases,
    sharded_shampoo_checkpoints,
]
ON_GPUS = [curvature_on_gpus, shampoo_on_gpus]
GPUS = 4 if torch.cuda.device_count() >= 4 else 2
few_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < GPUS, reason=f"fewer than {GPUS} CUDA devices"
)


def cases_of(modules: list[ModuleType], device_type: str) -> list[object]:
    """One group of processes, in one worker, runs all cases of its device and number of ranks."""
    on_gpus = device_type == "cuda"
    names = {module.__name__ for module in modules}
    result = []
    for (module, name), all_ranks in CASES.items():
        if module not in names or (on_gpus and (module, name) in WITHOUT_CUDA):
            continue
        for ranks in (GPUS,) if on_gpus else all_ranks:
            marks = [pytest.mark.xdist_group(f"{ranks} ranks, {device_type}")]
            if on_gpus:
                marks += [pytest.mark.cuda, few_gpus]
                least = GPUS_OF_CASES.get((module, name), GPUS)
                reason = f"fewer than {least} CUDA devices"
                marks.append(pytest.mark.skipif(least > GPUS, reason=reason))
            label = f"{ranks}-{device_type}-{module}-{name}"
            result.append(pytest.param(device_type, ranks, module, name, id=label, marks=marks))
    return result


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """By their devices and numbers of ranks; each starts with its first case."""
    groups = {
        (device_type, ranks): Ranks(ranks, tmp_path_factory.mktemp("ranks"), device_type)
        for device_type, ranks in (("cpu", 2), ("cpu", 3), ("cpu", 4), ("cuda", GPUS))
    }
    yield groups
    for group in groups.values():
        group.stop()


@pytest.mark.parametrize(
    ("device_type", "ranks", "module", "name"),
    [*cases_of(ON_BOTH + ON_CPU, "cpu"), *cases_of(ON_BOTH + ON_GPUS, "cuda")],
)
def test_on_ranks(groups, device_type, ranks, module, name):
    groups[device_type, ranks].check(module, name)


@pytest.mark.cuda
@few_gpus
@pytest.mark.xdist_group(f"{GPUS} ranks, cuda")
def test_updates_are_gathered_where_no_memory_is_read(tmp_path):
    """Ranks without a TCP store do not read each other's memory."""
    group = Ranks(GPUS, tmp_path, "cuda", by_tcp=False)
    try:
        group.check(shampoo_on_gpus.__name__, "equals_one_process")
    finally:
        group.stop()


@pytest.mark.cuda
@pytest.mark.xdist_group("1 rank, cuda")
def test_one_gpu_steps_as_a_group(tmp_path):
    group = Ranks(1, tmp_path, "cuda")
    try:
        for name in (
            "equals_one_process",
            "gradients_of_any_scale_equal_one_process",
            "shards_equal_one_process",
            "skipped_steps_keep_the_schedule_of_roots",
            "captured_steps_equal_launched_ones",
        ):
            group.check(shampoo_on_gpus.__name__, name)
    finally:
        group.stop()


@pytest.mark.xdist_group("2 ranks, cpu")
def test_a_new_group_follows_a_failure(groups):
    group, module = groups["cpu", 2], runner_cases.__name__
    for failing, text in (
        ("one_rank_raises", "rank 1: .*the last rank"),
        ("one_rank_ends", "rank 1: the process has ended with exit code 3"),
    ):
        with pytest.raises(AssertionError, match=f"(?s)rank 0: .*{text}"):
            group.check(module, failing)
        group.check(module, "all_ranks_meet")
