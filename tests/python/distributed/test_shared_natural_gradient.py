"""Several processes share the steps of NaturalGradient: the cases of natural_gradient_cases.py and
natural_gradient_failures.py, with gloo on the CPU."""

from __future__ import annotations

from pathlib import Path

import natural_gradient_run
import pytest
import shared_tools
import torch
import torch.distributed as dist
import torchium
from captured_layers import loss_fn, model_and_batch

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.xdist_group("ranks"),
]
RANKS = (2, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    return shared_tools.spawn(natural_gradient_run.run, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(ranks, name) for ranks in RANKS for name in natural_gradient_run.cases_of(ranks)],
)
def test_ranks_that_share_steps(results, name, ranks):
    shared_tools.check_case(results, ranks, name)


def test_a_group_of_one_changes_no_bit(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        results = []
        for group in (None, dist.group.WORLD):
            model, _ = model_and_batch("convolutions", dtype=torch.float32)
            optimizer = torchium.NaturalGradient(model, update_freq=2, process_group=group)
            for seed in range(4):
                x, y = model_and_batch("convolutions", dtype=torch.float32, seed=seed)[1]
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
            state = optimizer.state_dict()["state"]
            tensors = {f"{i}.{k}": v for i, s in state.items() for k, v in s.items()}
            tensors.update(model.state_dict())
            results.append(tensors)
    finally:
        dist.destroy_process_group()
    shared_tools.assert_same(results[1], results[0])
