"""A model and its optimizer that are trained twice: with CUDA graphs of the steps, and without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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
