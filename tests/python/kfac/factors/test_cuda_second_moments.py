"""Sums of outer products on tensor cores, of which only the lower triangle is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchium._capture.layers import LayerKind, core_row

pytestmark = pytest.mark.cuda
ops = torch.ops.torchium

# Elements of a vector, vectors: one stage and many, parts that begin within a tile and that span
# several, rows beyond the last tile.
SIZES = [
    (512, 100),
    (712, 1000),
    (520, 90),
    (1000, 777),
    (1024, 1),
    (2048, 63),
    (2304, 8192),
    (512, 100000),
    (1100, 5000),
    (256, 400000),
]


def sums(inputs: Tensor, order: int, accumulate: bool) -> Tensor:
    """The factors of a linear layer with these inputs: a bias needs one order more."""
    size = inputs.shape[1]
    A = torch.full((1, order, order), 0.5 if accumulate else torch.nan, device="cuda")
    G = torch.zeros(1, 1, 1, device="cuda")
    call = core_row(LayerKind.LINEAR, -1, -1, 0, [])
    gradients = inputs.new_ones(len(inputs), 1)
    ops.kronecker_factors_update_(
        A, G, inputs, gradients, call=call, weight_shape=[1, size], accumulate=accumulate
    )
    return A[0]


@pytest.mark.parametrize(("size", "count"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_second_moments(
    size: int, count: int, dtype: torch.dtype, accumulate: bool, with_bias: bool
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(count, size, device="cuda", dtype=dtype)
    actual = sums(inputs, size + with_bias, accumulate)
    X = inputs.double()
    if with_bias:
        X = torch.cat([X, X.new_ones(count, 1)], 1)
    expected = X.T @ X + (0.5 if accumulate else 0)
    assert torch.equal(actual, actual.T)
    # Tensor cores truncate sums as they add to them.
    assert (actual - expected).norm() <= (1e-6 + 5e-9 * min(count, 30_000)) * expected.norm()


def test_second_moments_are_the_same_in_every_run() -> None:
    inputs = torch.randn(5000, 1152, device="cuda", dtype=torch.bfloat16)
    first = sums(inputs, 1152, False)
    for _ in range(20):
        assert torch.equal(sums(inputs, 1152, False), first)
