"""The reference optimizers against closed formulas and numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from matrix_cases import randn
from reference import (
    ReferenceAdagrad,
    ReferenceShampoo,
    blocks_of,
    damped_power,
    preconditioned_shape,
    root_is_due,
)

CLOSE = {"rtol": 1e-11, "atol": 1e-13}


def direction_of_one_step(g: torch.Tensor, **options) -> torch.Tensor:
    p = torch.zeros_like(g)
    p.grad = g
    ReferenceShampoo([p], lr=1.0, **options).step()
    return -p


@pytest.mark.parametrize(
    ("shape", "block_size", "merge_dims", "expected"),
    [
        ((), 4, True, []),
        ((1, 7), 4, True, [7]),
        ((7, 1), 4, True, [7]),
        ((64, 3, 5, 5), 4, True, [64, 75]),  # a convolution, for any block size
        ((64, 3, 5, 5), 4, False, [64, 3, 5, 5]),
        ((8, 1, 3, 1), 4, False, [8, 3]),
        ((1, 4, 3, 3), 4, True, [36]),
        ((8, 1, 1, 1), 4, True, [8]),
        ((2, 3, 4), 1024, True, [2, 12]),  # at least order two
        ((2, 3, 4), 11, True, [6, 4]),
        ((2, 3, 4), 4, True, [2, 3, 4]),
        ((16, 4, 3, 3, 3), 108, True, [16, 108]),
        ((16, 4, 3, 3, 3), 64, True, [64, 27]),
        ((16, 4, 3, 3, 3), 10, True, [16, 4, 3, 9]),
        ((5, 6), 1024, True, [5, 6]),
    ],
)
def test_preconditioned_shape(shape, block_size, merge_dims, expected):
    assert preconditioned_shape(shape, block_size, merge_dims) == expected


@pytest.mark.parametrize(
    ("shape", "block_size", "target_order", "expected"),
    [
        ((), 4, 1, [1]),
        ((), 4, 0, []),
        ((1, 1), 4, 1, [1]),
        ((1, 7), 4, 2, [7]),
        ((1, 7), 4, 0, [1, 7]),
        ((5, 6), 30, 1, [30]),
        ((5, 6), 29, 1, [5, 6]),
        ((5, 6), 30, 2, [5, 6]),
        ((2, 3, 4), 1024, 1, [24]),
        ((2, 3, 4), 1024, 2, [2, 12]),
        ((2, 3, 4), 1024, 3, [2, 3, 4]),
        # Examples of Distributed Shampoo's merge_small_dims.
        ((1, 2, 5, 1), 10, 1, [10]),
        ((1, 2, 5, 1), 1, 1, [2, 5]),
        ((32, 3, 64, 64), 8192, 1, [96, 4096]),
        ((32, 3, 64, 64), 1_000_000, 2, [32, 12288]),
        ((8, 4, 3, 3), 24, 2, [8, 4, 9]),
        ((8, 3, 3, 3), 24, 2, [24, 9]),
        ((8, 3, 3, 3), 1024, 0, [8, 3, 3, 3]),
    ],
)
def test_preconditioned_shape_with_a_target(shape, block_size, target_order, expected):
    assert preconditioned_shape(shape, block_size, True, target_order) == expected


def test_blocks_are_pieces_and_a_remainder():
    assert list(blocks_of([5, 4], 4)) == [
        (slice(0, 4), slice(0, 4)),
        (slice(4, 5), slice(0, 4)),
    ]
    assert list(blocks_of([], 4)) == [()]


def test_damped_power_by_hand():
    A = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)  # eigenvalues 3 and 1
    plus, minus = (3 + 1 + 0.5 * 3) ** -0.5, (1 + 1 + 0.5 * 3) ** -0.5
    expected = torch.tensor([[plus + minus, plus - minus], [plus - minus, plus + minus]]) / 2
    X = damped_power(A, -0.5, eps=1.0, relative_eps=0.5)
    torch.testing.assert_close(X, expected.double(), rtol=1e-7, atol=0)


def test_schedule():
    due = [t for t in range(1, 31) if root_is_due(t, 10)]
    assert due == [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 30]
    assert [t for t in range(30, 81) if root_is_due(t, 10)] == [30, 32, 40, 48, 50, 56, 60, 70, 80]
    assert [t for t in range(1, 17) if root_is_due(t, 10, start=5)] == [5, 6, 7, 8, 10, 12, 14, 16]
    assert [t for t in range(1, 6) if root_is_due(t, 1)] == [1, 2, 3, 4, 5]
    assert [t for t in range(1, 6) if root_is_due(t, 1, start=4)] == [4, 5]


def test_matrix_direction_by_svd():
    """G = U S V^T: (G G^T + eps)^(-1/4) G (G^T G + eps)^(-1/4) = U S (S^2 + eps)^(-1/2) V^T."""
    G, eps = randn(5, 5), 0.1
    U, S, Vh = torch.linalg.svd(G)
    expected = U @ torch.diag(S / (S**2 + eps).sqrt()) @ Vh
    torch.testing.assert_close(direction_of_one_step(G, eps=eps), expected, **CLOSE)


def test_convolution_is_a_matrix():
    G = randn(6, 2, 3, 2)
    expected = direction_of_one_step(G.reshape(6, 12)).reshape(G.shape)
    torch.testing.assert_close(direction_of_one_step(G), expected, **CLOSE)


@pytest.mark.parametrize("order", [3, 4, 5])
def test_rank_one_tensor(order):
    """For a (x) b (x) ..., every mode has the eigenvalue |g|^2 along its vector."""
    vectors = [randn(2 + i, seed=i) for i in range(order)]
    g = vectors[0]
    for v in vectors[1:]:
        g = g.unsqueeze(-1) * v
    expected = g / (g.norm() ** 2 + 0.1).sqrt()
    torch.testing.assert_close(
        direction_of_one_step(g, eps=0.1, merge_dims=False), expected, **CLOSE
    )


def test_vector_rules():
    g = randn(6)
    torch.testing.assert_close(direction_of_one_step(g, eps=0.1), g / (g**2 + 0.1).sqrt(), **CLOSE)
    torch.testing.assert_close(
        direction_of_one_step(g, eps=0.1, preconditioner_1d="full"),
        g / (g.norm() ** 2 + 0.1).sqrt(),
        **CLOSE,
    )


def test_exponent_does_not_change_the_diagonal_rule():
    g = randn(6)
    same = direction_of_one_step(g, exponent=-1.0)
    torch.testing.assert_close(same, direction_of_one_step(g), rtol=0, atol=0)
    full = direction_of_one_step(g, eps=0.1, exponent=-1.0, preconditioner_1d="full")
    torch.testing.assert_close(full, g / (g.norm() ** 2 + 0.1), **CLOSE)


def test_blocks_are_independent():
    G = randn(5, 7)
    whole = direction_of_one_step(G, block_size=4)
    for rows in (slice(0, 4), slice(4, 5)):
        for columns in (slice(0, 4), slice(4, 7)):
            block = direction_of_one_step(G[rows, columns].clone())
            if rows.start == 4:  # a 1 x n block of a matrix keeps k = 2
                x = G[rows, columns]
                block = x / (x.norm() ** 2 + 1e-4).sqrt()
            torch.testing.assert_close(whole[rows, columns], block, **CLOSE)


def test_one_scalar_by_hand():
    """Two steps of every component on one number, in Python floats."""
    lr, eps, wd, mu, b1, b2 = 0.1, 1e-3, 0.01, 0.9, 0.8, 0.95
    p = torch.tensor(2.0, dtype=torch.float64)
    reference = ReferenceShampoo(
        [p], lr, eps, 1, wd, betas=(b1, b2), momentum=mu, nesterov=True, grafting="adam",
        grafting_eps=1e-2, maximize=True,
    )  # fmt: skip
    x, a, exp_avg, v, buffer = 2.0, 0.0, 0.0, 0.0, 0.0
    for t, gradient in enumerate((0.5, -1.5), start=1):
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        reference.step()
        g = -gradient + wd * x
        a = b2 * a + (1 - b2) * g * g
        exp_avg = b1 * exp_avg + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        m, c = exp_avg / (1 - b1**t), 1 - b2**t
        d = m / math.sqrt(a / c + eps)
        graft = m / (math.sqrt(v / c) + 1e-2)
        d *= abs(graft) / abs(d)
        buffer = mu * buffer + d
        x -= lr * (d + mu * buffer)
        assert p.item() == pytest.approx(x, rel=1e-14)


def test_decoupled_weight_decay_by_hand():
    p = torch.tensor([2.0], dtype=torch.float64)
    p.grad = torch.tensor([3.0], dtype=torch.float64)
    ReferenceShampoo([p], 0.1, 0.0, 1, 0.5, decoupled_weight_decay=True).step()
    assert p.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1, rel=1e-14)


@pytest.mark.parametrize("grafting", ["sgd", "adagrad", "rmsprop", "adam"])
def test_grafting_keeps_direction_and_takes_norm(grafting):
    G = randn(4, 4)
    plain = direction_of_one_step(G, betas=(0.0, 0.9))
    grafted = direction_of_one_step(G, betas=(0.0, 0.9), grafting=grafting, grafting_eps=0.0)
    torch.testing.assert_close(plain / plain.norm(), grafted / grafted.norm(), **CLOSE)
    norm = {"sgd": G.norm().item(), "adagrad": 4.0, "rmsprop": 4 / math.sqrt(0.1), "adam": 4.0}
    assert grafted.norm().item() == pytest.approx(norm[grafting])  # sign(G) has norm 4


def test_before_the_start_the_grafted_direction_is_used():
    G = randn(4, 4)
    first = direction_of_one_step(G, start_preconditioning_step=2)
    torch.testing.assert_close(first, G, rtol=0, atol=0)
    first = direction_of_one_step(G, start_preconditioning_step=2, grafting="adagrad")
    torch.testing.assert_close(first, G.sign(), rtol=1e-6, atol=0)


def test_roots_are_cached_between_updates():
    """Statistics continue, but a step without roots due applies the last root, not the gradient."""
    p = torch.zeros(3, 3, dtype=torch.float64)
    reference = ReferenceShampoo([p], lr=1.0, eps=0.1, update_freq=100)
    gradients = [randn(3, 3, seed=s) for s in range(9)]  # no root is due at step 9
    for g in gradients:
        before = p.clone()
        p.grad = g
        reference.step()
    L = sum(g @ g.T for g in gradients[:8])
    R = sum(g.T @ g for g in gradients[:8])
    expected = damped_power(L, -0.25, 0.1) @ gradients[8] @ damped_power(R, -0.25, 0.1)
    torch.testing.assert_close(before - p, expected, **CLOSE)


def test_none_gradients_do_not_count():
    p, q = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    reference = ReferenceShampoo([p, q])
    p.grad = torch.eye(2, dtype=torch.float64)
    reference.step()
    assert reference.state[0]["step"] == 1
    assert reference.state[1] == {}
    assert torch.equal(q, torch.ones_like(q))


def test_a_non_finite_gradient_skips_the_step():
    p, q = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    reference = ReferenceShampoo([p, q])
    p.grad, q.grad = torch.ones_like(p), torch.tensor([1.0, math.inf], dtype=torch.float64)
    reference.step()
    assert torch.equal(p, torch.ones_like(p))
    assert reference.state == [{}, {}]


def test_diagonal_adagrad_is_that_of_torch():
    p = randn(3, 4)
    q = p.clone()
    options = dict(lr=0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.2)
    reference = ReferenceAdagrad([p], **options)
    theirs = torch.optim.Adagrad([q], **options)
    for seed in range(5):
        p.grad = q.grad = randn(3, 4, seed=seed)
        reference.step()
        theirs.step()
    torch.testing.assert_close(p, q, **CLOSE)


def test_full_matrix_adagrad_by_sherman_morrison():
    """After one step G = a I + x x^T, so the direction is x / sqrt(a + |x|^2 + eps)."""
    x = randn(3, 3)
    p = torch.zeros_like(x)
    p.grad = x
    ReferenceAdagrad(
        [p], 1.0, initial_accumulator_value=0.5, eps=0.1, full_matrix=True, block_size=5
    ).step()
    flat = x.flatten()
    expected = torch.cat([b / (0.5 + b.norm() ** 2 + 0.1).sqrt() for b in (flat[:5], flat[5:])])
    torch.testing.assert_close(-p.flatten(), expected, **CLOSE)
