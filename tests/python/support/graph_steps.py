"""Steps of an optimizer of plain parameters, captured and launched."""

from __future__ import annotations

from typing import Any

import torch
from optimizer_cases import assert_same
from torch import nn


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
