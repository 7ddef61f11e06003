"""A model and its optimizer that are trained twice: with CUDA graphs of the steps, and without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from graph_steps import launches_of_a_step
from optimizer_cases import assert_same
from torch import Tensor, nn
from torch.optim import Optimizer


class GraphRun:
    """Is trained on the same batches as others; defines backward(index)."""

    model: nn.Module
    optimizer: Optimizer

    def __init__(self) -> None:
        self.held: list[Tensor] = []  # so that nothing lies where it did before

    def backward(self, index: int) -> None:
        raise NotImplementedError

    def train(self, first: int, count: int, **batch: int) -> None:
        for index in range(first, first + count):
            self.backward(index, **batch)
            self.optimizer.step()

    @property
    def graphs(self) -> int:
        return self.optimizer._plan.core.graph_count()

    def values(self) -> list[Any]:
        params = [p.detach().clone() for p in self.model.parameters()]
        return [params, self.optimizer.state_dict()["state"]]


def assert_both_same(runs: tuple[GraphRun, GraphRun]) -> None:
    for each in runs:
        each.optimizer.check_errors()
    assert_same(runs[0].values(), runs[1].values())
    assert runs[1].graphs == 0


def assert_same_reports(runs: tuple[GraphRun, GraphRun]) -> None:
    """But for the memory of graphs."""
    first, second = (each.optimizer.report() for each in runs)
    assert first.pop("graph_bytes") > 0
    assert second.pop("graph_bytes") == 0
    assert first == second


def change_learning_rates_between_replays(runs: tuple[GraphRun, GraphRun], count: int) -> None:
    for each in runs:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(each.optimizer, count)
        for index in range(count):
            each.train(index, 1)
            scheduler.step()


def skip_a_step(run: GraphRun, first: int, count: int) -> None:
    """Then goes on."""
    run.backward(first)
    next(run.model.parameters()).grad[3, 3] = float("nan")
    run.optimizer.step()
    torch.cuda.synchronize()  # so that the next refresh follows the skip in both runs
    run.train(first + 1, count)


def assert_a_replay_and_little_else(run: GraphRun, before: int) -> None:
    """Of what the host launches in a step after this number of others."""
    run.train(0, before)
    run.backward(before)
    launched = launches_of_a_step(run.optimizer)
    assert launched.count("cudaGraphLaunch") == 1
    assert len(launched) <= 4


# ---- changes in mid-run


def freeze(run: GraphRun) -> None:
    run.model[0].requires_grad_(False)


def thaw(run: GraphRun) -> None:
    run.model[0].requires_grad_(True)


def reload(run: GraphRun) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def replace_data(run: GraphRun) -> None:
    for p in run.model.parameters():
        p.data = p.data.clone()


def set_option(**options: Any) -> Callable[[GraphRun], None]:
    return lambda run: run.optimizer.param_groups[0].update(options)
