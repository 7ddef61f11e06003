"""Making, the first step and loading of an optimizer with many parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchium
from optimizer_cases import ALL_CASES
from torch import nn

CASES = {
    **{
        case: ALL_CASES[case] for case in ("shampoo", "adagrad", "kfac", "natural_gradient_between")
    },
    "adahessian": torchium.AdaHessian,
}


def lines_in(function: Callable[[], object]) -> int:
    """Lines of Python that run, again for each turn of a loop."""
    count = 0

    def trace(_frame: object, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_lines_grow_with_the_number_of_parameters_and_not_its_square(make):
    counts = []
    for layers in (25, 200):
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])
        optimizer = make(model.parameters())
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward(create_graph=isinstance(optimizer, torchium.AdaHessian))
        first_step = lines_in(optimizer.step)
        saved = optimizer.state_dict()
        loading = lines_in(partial(optimizer.load_state_dict, saved))
        making = lines_in(partial(make, model.parameters()))
        counts.append((making, first_step, loading))
    for few, many in zip(*counts, strict=True):
        assert many < 10 * few  # 8 times as many parameters
