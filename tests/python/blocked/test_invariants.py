"""Properties that hold for every shape and option, independent of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchium
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

SHAPES = st.lists(st.integers(1, 6), max_size=5).map(tuple)
MATRICES = st.tuples(st.integers(1, 9), st.integers(1, 9))
SEEDS = st.integers(0, 2**31)
MERGING = st.sampled_from([{}, {"merge_dims": False}, *({"target_order": t} for t in (0, 1, 2))])
OPTIONS = st.fixed_dictionaries(
    {
        "update_freq": st.sampled_from([1, 2, 3]),
        "block_size": st.sampled_from([1, 3, 4, 1024]),
        "betas": st.sampled_from([(0.0, 1.0), (0.9, 0.95), (0.0, 0.9)]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "preconditioner_1d": st.sampled_from(["diagonal", "full"]),
        "grafting": st.sampled_from([None, "sgd", "adagrad", "rmsprop", "adam"]),
        "start_preconditioning_step": st.sampled_from([1, 2]),
    }
).flatmap(lambda options: MERGING.map(lambda merging: {**options, **merging}))
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def random_tensors(shape, seed: int, count: int = 3) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=rng) for _ in range(count)]


def run(params: list[Tensor], gradients: list[list[Tensor | None]], **options: Any) -> list[Tensor]:
    """The parameters after one step with each list of gradients."""
    parameters = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = torchium.Shampoo(parameters, **{"lr": 0.1, "eps": 1e-2, **options})
    for step in gradients:
        for p, g in zip(parameters, step, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
    return [p.detach() for p in parameters]


def run_one(gradients: list[Tensor], **options: Any) -> Tensor:
    """The parameter, from zero, after steps with the given gradients."""
    return run([torch.zeros_like(gradients[0])], [[g] for g in gradients], **options)[0]


@given(SHAPES, OPTIONS, SEEDS)
def test_a_parameter_does_not_feel_its_neighbours(shape, options, seed):
    """One group, two orders and separate optimizers: the same numbers."""
    a, b = random_tensors(shape, seed), random_tensors((4, 5), seed + 1)
    start = [torch.zeros_like(a[0]), torch.zeros_like(b[0])]
    together = run(start, [[x, y] for x, y in zip(a, b, strict=True)], **options)
    swapped = run(start[::-1], [[y, x] for x, y in zip(a, b, strict=True)], **options)
    torch.testing.assert_close(together, swapped[::-1], **CLOSE)
    torch.testing.assert_close(together[0], run_one(a, **options), **CLOSE)
    torch.testing.assert_close(together[1], run_one(b, **options), **CLOSE)


@given(SHAPES, OPTIONS, SEEDS)
def test_a_step_without_gradient_changes_nothing(shape, options, seed):
    a, b = random_tensors(shape, seed), random_tensors((3, 4), seed + 1)
    start = [torch.zeros_like(a[0]), torch.zeros_like(b[0])]
    with_gaps = run(
        start, [[a[0], b[0]], [None, b[1]], [a[1], None], [None, None], [a[2], b[2]]], **options
    )
    torch.testing.assert_close(with_gaps[0], run_one(a, **options), **CLOSE)
    torch.testing.assert_close(with_gaps[1], run_one(b, **options), **CLOSE)


@given(MATRICES, OPTIONS, SEEDS)
def test_blocks_are_parameters_of_their_own(shape, options, seed):
    """A matrix in blocks moves as the blocks would as separate matrices."""
    options = {**options, "block_size": 4}
    assume(min(shape) > 1)
    gradients = random_tensors(shape, seed)
    whole = run_one(gradients, **options)
    for rows in torch.arange(shape[0]).split(4):
        for columns in torch.arange(shape[1]).split(4):
            if min(len(rows), len(columns)) == 1:
                continue  # as a parameter it would be squeezed to a vector
            block = [g[rows][:, columns] for g in gradients]
            torch.testing.assert_close(whole[rows][:, columns], run_one(block, **options), **CLOSE)


@given(SHAPES, OPTIONS, SEEDS)
def test_memory_layout_does_not_matter(shape, options, seed):
    """Gradients and parameters with any strides give the same result as contiguous ones."""
    gradients = random_tensors(shape, seed)
    expected = run_one(gradients, **options)

    def permuted(x: Tensor) -> Tensor:
        backwards = tuple(reversed(range(x.dim())))
        return x.permute(backwards).contiguous().permute(backwards)

    p = nn.Parameter(permuted(torch.zeros_like(gradients[0])))
    optimizer = torchium.Shampoo([p], **{"lr": 0.1, "eps": 1e-2, **options})
    for i, g in enumerate(gradients):
        p.grad = permuted(g) if i % 2 == 0 else g.clone()
        optimizer.step()
    torch.testing.assert_close(p.detach(), expected, **CLOSE)


@given(MATRICES, SEEDS, st.sampled_from([None, "sgd"]))
def test_rotations_of_a_matrix(shape, seed, grafting):
    """U G V^T moves by U d V^T: Shampoo is independent of the basis of a block."""
    gradients = random_tensors(shape, seed)
    U, V = (torch.linalg.qr(random_tensors((n, n), seed + n, 1)[0])[0] for n in shape)
    assume(min(shape) > 1)  # a vector under the diagonal rule keeps its basis
    options = {"update_freq": 1, "betas": (0.9, 0.95), "grafting": grafting}
    moved = run_one(gradients, **options)
    rotated = run_one([U @ g @ V.T for g in gradients], **options)
    torch.testing.assert_close(rotated, U @ moved @ V.T, rtol=1e-8, atol=1e-10)


@given(MATRICES, OPTIONS, SEEDS)
def test_transposed_matrices_move_alike(shape, options, seed):
    gradients = random_tensors(shape, seed)
    moved = run_one(gradients, **options)
    transposed = run_one([g.T.contiguous() for g in gradients], **options)
    torch.testing.assert_close(transposed, moved.T, **CLOSE)


@given(SHAPES, SEEDS, st.sampled_from([1e-3, 7.0, 1e4]))
def test_direction_without_eps_is_free_of_scale(shape, seed, scale):
    """exponents -1/(2k) over k modes: with summed statistics the scale of the gradient cancels."""
    options = {
        "eps": 0.0, "relative_eps": 1e-2, "update_freq": 1, "preconditioner_1d": "full",
        "root_method": "eigh",
    }  # fmt: skip
    gradients = random_tensors(shape, seed)
    torch.testing.assert_close(
        run_one([scale * g for g in gradients], **options),
        run_one(gradients, **options),
        rtol=1e-7,
        atol=1e-9,
    )


@given(SHAPES, OPTIONS, SEEDS)
def test_the_first_step_goes_downhill(shape, options, seed):
    (gradient,) = random_tensors(shape, seed, 1)
    moved = run_one([gradient], **options)
    assert (moved * gradient).sum() < 0


@given(SHAPES, OPTIONS, SEEDS)
def test_maximize_is_minimising_the_negative(shape, options, seed):
    gradients = random_tensors(shape, seed)
    (start,) = random_tensors(shape, seed + 1, 1)
    options["weight_decay"] = 0.1
    steps = [[g] for g in gradients]
    negated = [[-g] for g in gradients]
    torch.testing.assert_close(
        run([start], negated, maximize=True, **options), run([start], steps, **options)
    )


@given(SHAPES, OPTIONS, SEEDS)
def test_gradients_are_not_written(shape, options, seed):
    gradients = random_tensors(shape, seed)
    kept = [g.clone() for g in gradients]
    p = nn.Parameter(torch.ones_like(gradients[0]))
    optimizer = torchium.Shampoo([p], weight_decay=0.1, maximize=True, **options)
    for g in gradients:
        p.grad = g
        optimizer.step()
    torch.testing.assert_close(gradients, kept, rtol=0, atol=0)


@given(SHAPES, OPTIONS, SEEDS)
def test_zero_gradients_only_decay(shape, options, seed):
    (start,) = random_tensors(shape, seed, 1)
    options.update(weight_decay=0.5, decoupled_weight_decay=True)
    (moved,) = run([start], [[torch.zeros_like(start)]], **options)
    torch.testing.assert_close(moved, start * (1 - 0.1 * 0.5), **CLOSE)


@given(MATRICES, SEEDS)
def test_grafting_on_sgd_keeps_the_norm_of_each_block(shape, seed):
    (gradient,) = random_tensors(shape, seed, 1)
    direction = -run_one([gradient], lr=1.0, grafting="sgd", block_size=4)
    for block, reference in zip(split(direction, 4), split(gradient, 4), strict=True):
        assert block.norm().item() == pytest.approx(reference.norm().item(), rel=1e-9)


def split(x: Tensor, size: int) -> list[Tensor]:
    pieces = [x]
    for dim in range(x.dim()):
        pieces = [part for piece in pieces for part in piece.split(size, dim)]
    return pieces


@given(SHAPES, SEEDS)
def test_full_matrix_adagrad_with_unit_blocks_is_diagonal(shape, seed):
    """A block of one element is diagonal Adagrad if its root is recomputed every step."""
    gradients = random_tensors(shape, seed)
    moved = []
    for options in (
        {"full_matrix": True, "block_size": 1, "eps": 1e-20, "update_freq": 1},
        {"eps": 0.0},
    ):
        p = nn.Parameter(torch.zeros_like(gradients[0]))
        optimizer = torchium.Adagrad([p], lr=0.1, **options)
        for g in gradients:
            p.grad = g.clone()
            optimizer.step()
        moved.append(p.detach())
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-9, atol=1e-11)
