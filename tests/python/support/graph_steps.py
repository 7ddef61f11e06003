"""Steps of an optimizer of plain parameters, captured and launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import assert_same
from torch import nn
from torch.profiler import ProfilerActivity, profile


def give_gradients(params: list[nn.Parameter], index: int) -> None:
    """In new memory, as after a backward pass following ``zero_grad(set_to_none=True)``."""
    generator = torch.Generator().manual_seed(1000 + index)
    for p in params:
        p.grad = None
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p) + 0.1 * p.detach()


def train(optimizer, params: list[nn.Parameter], first: int, count: int) -> None:
    for index in range(first, first + count):
        give_gradients(params, index)
        optimizer.step()


def graph_count(optimizer) -> int:
    return optimizer._plans.graph_count()


def values(optimizer, params: list[nn.Parameter]) -> list[Any]:
    return [[p.detach().clone() for p in params], optimizer.state_dict()["state"]]


def assert_both_same(pairs) -> None:
    (with_graphs, params), (without, expected) = pairs
    with_graphs.check_errors()
    without.check_errors()
    assert_same(values(with_graphs, params), values(without, expected))


# Changes that a captured step has to notice.


def replace_data(optimizer, params: list[nn.Parameter]) -> None:
    for p in params:
        p.data = p.data.clone()


def reload(optimizer, params: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def freeze(optimizer, params: list[nn.Parameter]) -> None:
    params.pop(1).grad = None


def set_option(**options: Any) -> Callable:
    return lambda optimizer, params: optimizer.param_groups[0].update(options)


def train_with_gradients_anywhere(pairs, count: int) -> None:
    kept = []
    for index in range(count):
        for optimizer, params in pairs:
            give_gradients(params, index)
            kept += [p.grad for p in params]  # so that no memory is used twice
            optimizer.step()


def change_learning_rates_between_replays(pairs) -> None:
    for optimizer, params in pairs:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        for index in range(30):
            train(optimizer, params, index, 1)
            scheduler.step()


def change_learning_rates_in_tensors(pairs, count: int) -> None:
    for optimizer, params in pairs:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.01, device="cuda")
        for index in range(count):
            optimizer.param_groups[0]["lr"].mul_(0.9)
            train(optimizer, params, index, 1)


def launches_of_a_step(optimizer) -> list[str]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        optimizer.step()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if "Launch" in event.name]


def check_skipped_steps(pairs) -> None:
    """They are skipped with and without graphs, and reported."""
    for optimizer, params in pairs:
        train(optimizer, params, 0, 12)
        give_gradients(params, 12)
        params[0].grad[3, 3] = float("nan")
        optimizer.step()
        torch.cuda.synchronize()  # so that the next roots follow the skip in both runs
        train(optimizer, params, 13, 10)
    assert_both_same(pairs)
    optimizer, params = pairs[0]
    assert graph_count(optimizer) > 0
    for index in range(3):
        give_gradients(params, index)
        params[0].grad.fill_(float("inf"))
        optimizer.step()
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        optimizer.check_errors()


def check_capture_of_the_caller(pairs, before: int) -> None:
    """After some steps with graphs, the first optimizer is captured, the other one is not."""
    for optimizer, params in pairs:
        train(optimizer, params, 0, before)
    (optimizer, params), (other, expected) = pairs
    assert graph_count(optimizer) > 0
    give_gradients(params, before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    give_gradients(expected, before)
    other.step()
    assert_both_same(pairs)
