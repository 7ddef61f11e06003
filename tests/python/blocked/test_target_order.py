"""target_order: dimensions merge as in Distributed Shampoo."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torchium
from hypothesis import given
from hypothesis import strategies as st
from optimizer_cases import set_gradients
from reference import preconditioned_shape
from torch import nn

SHAPES = [
    (), (1,), (7,), (5, 3), (1, 6), (6, 1), (1, 1), (3, 2, 5), (2, 1, 6), (4, 3, 2, 2), (1, 3, 2, 2), (8, 4, 3, 3),
    (8, 3, 3, 3), (4, 2, 1, 1), (1, 3, 1, 1), (2, 1, 2, 2, 3), (3, 2, 2, 2, 2), (2, 2, 2, 2, 2, 2),
]  # fmt: skip
LIMITS = (1, 2, 4, 9, 12, 24, 1024)
TARGETS = (1, 2, 3, 4, 7, math.inf)


def blocks(dims: tuple[int, ...], block_size: int) -> str:
    """The blocks of these dimensions, as a report lists them."""
    if not dims:
        return "order 0, without matrices"
    pieces = []
    for dim in dims:
        whole, rest = divmod(dim, block_size)
        pieces.append([(n, size) for n, size in ((whole, block_size), (1, rest)) if n and size])
    parts = []
    for combination in itertools.product(*pieces):
        count = math.prod(n for n, _ in combination)
        sizes = "x".join(str(size) for _, size in combination)
        parts.append(f"{count} block{'s' * (count > 1)} {sizes}")
    return ", ".join([*parts, f"exponent -1/{2 * len(dims)}"])


def assert_has_their_dims(shape: tuple[int, ...], limit: int, target: float) -> None:
    order = 0 if target == math.inf else int(target)
    optimizer = torchium.Shampoo(
        [nn.Parameter(torch.empty(shape, device="meta"))],
        block_size=limit,
        target_order=order,
        preconditioner_1d="full",
        max_preconditioned_dim=None,
    )
    dims = tuple(preconditioned_shape(shape, limit, True, order))
    assert optimizer.report().parameters[0].detail == blocks(dims, limit)
    assert tuple(torch.ops.torchium.merged_dims(shape, limit, order)) == dims


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dimensions_are_those_of_distributed_shampoo(shape, target):
    for limit in LIMITS:
        assert_has_their_dims(shape, limit, target)


@given(
    st.lists(st.integers(1, 40), max_size=6),
    st.one_of(st.integers(1, 50), st.integers(51, 10**6)),
    st.sampled_from(TARGETS),
)
def test_dimensions_of_any_shape(shape, limit, target):
    assert_has_their_dims(tuple(shape), limit, target)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 3, 0, 5), (0, 2000, 3000)])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_parameters_without_elements_have_no_matrices(shape, order):
    p = nn.Parameter(torch.ones(shape))
    optimizer = torchium.Shampoo([p], target_order=order, preconditioner_1d="full")
    set_gradients([p], 0)
    optimizer.step()
    assert optimizer.report().parameters[0].rule == "diagonal"
    assert not [key for key in optimizer.state[p] if key.startswith("statistics")]


def test_a_flattened_matrix_steps_as_its_vector():
    matrix = nn.Parameter(torch.zeros(6, 4))
    vector = nn.Parameter(torch.zeros(24))
    for p in (matrix, vector):
        optimizer = torchium.Shampoo([p], target_order=1, preconditioner_1d="full", eps=1e-2)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            p.grad = torch.randn(24, generator=generator).view_as(p)
            optimizer.step()
        assert optimizer.state[p]["statistics.0"].shape == (1, 24, 24)
    assert torch.equal(matrix.flatten(), vector)


def test_channels_last_steps_as_contiguous():
    ends = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        params = []
        for shape in ((4, 3, 2, 2), (8, 3, 3, 3), (1, 3, 2, 2)):
            p = torch.linspace(-1, 1, math.prod(shape)).view(shape)
            params.append(nn.Parameter(p.contiguous(memory_format=memory_format)))
        optimizer = torchium.Shampoo(
            params, target_order=1, block_size=60, grafting="adam", betas=(0.9, 0.99)
        )
        for step in range(3):
            set_gradients(params, step)
            for p in params:
                p.grad = p.grad.contiguous(memory_format=memory_format)
            optimizer.step()
        ends.append([p.detach().contiguous() for p in params])
    torch.testing.assert_close(ends[0], ends[1])


def test_a_scalar_as_given_takes_the_average_of_its_gradient():
    p = nn.Parameter(torch.tensor(1.0))
    optimizer = torchium.Shampoo([p], lr=0.5, target_order=0, preconditioner_1d="full")
    p.grad = torch.tensor(3.0)
    optimizer.step()
    assert p.item() == 1.0 - 0.5 * 3.0
    assert set(optimizer.state[p]) == {"step"}
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.update_preconditioners()
    optimizer.step()
    assert p.item() == 1.0 - 2 * 0.5 * 3.0


def trained(params: list[nn.Parameter], **options: object) -> torchium.Shampoo:
    optimizer = torchium.Shampoo(params, preconditioner_1d="full", **options)
    set_gradients(params, 0)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("order", [0, 1, 2])
def test_checkpoints_keep_it(order):
    params = [nn.Parameter(torch.ones(shape)) for shape in ((6, 4), (3, 1, 2), (2, 3, 2, 2), ())]
    optimizer = trained(params, target_order=order)
    others = copy.deepcopy(params)
    other = torchium.Shampoo(others)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["target_order"] == order
    for each, own in ((optimizer, params), (other, others)):
        set_gradients(own, 1)
        each.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_checkpoints_without_it_are_those_of_none():
    optimizer = trained([nn.Parameter(torch.ones(6, 4))])
    state = optimizer.state_dict()
    del state["param_groups"][0]["target_order"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["target_order"] is None


@pytest.mark.parametrize(
    ("shape", "before", "after"), [((6, 4), 2, 1), ((3, 2, 2), 1, 0), ((2, 1, 3), 0, 2), ((), 1, 0)]
)
def test_state_of_other_blocks_is_refused(shape, before, after):
    p = nn.Parameter(torch.ones(shape))
    optimizer = trained([p], target_order=before)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["target_order"] = after
    with pytest.raises(ValueError, match=r"the optimizer needs|unexpected|missing"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["target_order"] == before


def test_needs_merging():
    message = "target_order=1 says how dimensions merge and needs merge_dims=True"
    with pytest.raises(ValueError, match=message):
        torchium.Shampoo([nn.Parameter(torch.ones(2, 2))], merge_dims=False, target_order=1)
