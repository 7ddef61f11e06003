"""torchium.Adagrad: the diagonal form is PyTorch's, the full-matrix form the paper's."""

from __future__ import annotations

import pytest
import torch
import torchium
from optimizer_cases import assert_same, mlp, run, set_gradients, values
from torch import nn

OPTIONS = [
    {},
    {"lr": 0.5},
    {"lr_decay": 0.05},
    {"weight_decay": 0.1},
    {"initial_accumulator_value": 0.3},
    {"eps": 1e-3},
    {"maximize": True},
    {"maximize": True, "weight_decay": 0.1},
    {
        "lr": 0.3,
        "lr_decay": 0.01,
        "weight_decay": 0.02,
        "initial_accumulator_value": 0.1,
        "eps": 1e-6,
        "maximize": True,
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_diagonal_form_is_pytorch_bit_for_bit(options, dtype):
    ours, theirs = mlp(dtype=dtype), mlp(dtype=dtype)
    optimizer = torchium.Adagrad(ours.parameters(), **options)
    reference = torch.optim.Adagrad(theirs.parameters(), **options)
    for step in range(0, 20, 5):
        expected = run(theirs, reference, step, 5)
        assert_same(run(ours, optimizer, step, 5), expected)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        state = reference.state[q]
        assert_same(dict(optimizer.state[p]), {**state, "step": state["step"].double()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (17, 1), (1000, 33), (70001,)])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e14])
def test_diagonal_form_is_pytorch_bit_for_bit_at_any_size_and_scale(dtype, shape, scale):
    """Vectorised and remaining entries round the same way, also for squares that underflow."""
    p, q = (
        nn.Parameter(torch.ones(shape, dtype=dtype)),
        nn.Parameter(torch.ones(shape, dtype=dtype)),
    )
    optimizer = torchium.Adagrad([p], weight_decay=1e-3)
    reference = torch.optim.Adagrad([q], weight_decay=1e-3)
    for step in range(5):
        set_gradients([p], step)
        p.grad.mul_(scale)
        q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    assert_same(p, q)


@pytest.mark.parametrize("single_tensor", [True, False])
def test_diagonal_form_is_pytorch_bit_for_bit_with_strided_parameters(single_tensor):
    ours, theirs = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model.to(memory_format=torch.channels_last)
    optimizer = torchium.Adagrad(ours.parameters(), lr=0.1)
    reference = torch.optim.Adagrad(theirs.parameters(), lr=0.1, foreach=not single_tensor)
    assert_same(run(ours, optimizer), run(theirs, reference))


def test_diagonal_form_with_a_scheduled_and_a_tensor_learning_rate():
    ours, theirs = mlp(), mlp()
    optimizer = torchium.Adagrad(ours.parameters(), lr=torch.tensor(0.1))
    reference = torch.optim.Adagrad(theirs.parameters(), lr=torch.tensor(0.1))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, reference)]
    for step in range(5):
        assert_same(run(ours, optimizer, step, 1), run(theirs, reference, step, 1))
        for scheduler in schedulers:
            scheduler.step()


def full_matrix_by_the_paper(start, gradients, *, lr, eps, block_size, initial=0.0, lr_decay=0.0):
    """x <- x - lr (G + eps I)^(-1/2) g on each block, in float64."""
    x = start.double().flatten()
    blocks = range(0, x.numel(), block_size)
    sums = {i: initial * torch.eye(x[i : i + block_size].numel()).double() for i in blocks}
    for t, gradient in enumerate(gradients):
        g = gradient.double().flatten()
        for i in blocks:
            part = slice(i, i + block_size)
            sums[i] += g[part].outer(g[part])
            w, v = torch.linalg.eigh(sums[i])
            root = (v * (w.clamp(min=0) + eps) ** -0.5) @ v.mT
            x[part] -= lr / (1 + t * lr_decay) * (root @ g[part])
    return x.reshape(start.shape)


@pytest.mark.parametrize("shape", [(), (5,), (4, 4), (3, 7), (2, 3, 4)])
@pytest.mark.parametrize("block_size", [4, 128])
@pytest.mark.parametrize("initial", [0.0, 0.5])
def test_full_matrix_form_is_that_of_the_paper(shape, block_size, initial, device):
    p = nn.Parameter(torch.ones(shape, dtype=torch.float64, device=device))
    start = p.detach().clone().cpu()
    options = {"lr": 0.1, "eps": 1e-3, "lr_decay": 0.1, "block_size": block_size}
    optimizer = torchium.Adagrad(
        [p], full_matrix=True, initial_accumulator_value=initial, **options
    )
    gradients = []
    for step in range(6):
        set_gradients([p], step)
        gradients.append(p.grad.clone().cpu())
        optimizer.step()
    expected = full_matrix_by_the_paper(start, gradients, initial=initial, **options)
    torch.testing.assert_close(p.detach().cpu(), expected, rtol=1e-9, atol=1e-9)


def test_full_matrix_form_does_not_care_for_rotations():
    """Unlike the diagonal form: the step of a rotated problem is the rotated step."""
    rotation, _ = torch.linalg.qr(
        torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    gradients = [
        torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(s))
        for s in range(5)
    ]

    def train(gradients, **options):
        p = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        optimizer = torchium.Adagrad([p], eps=1e-6, **options)
        for g in gradients:
            p.grad = g.clone()
            optimizer.step()
        return p.detach()

    rotated = [rotation @ g for g in gradients]
    full = train(gradients, full_matrix=True)
    torch.testing.assert_close(
        train(rotated, full_matrix=True), rotation @ full, rtol=1e-7, atol=1e-9
    )
    assert not torch.allclose(train(rotated), rotation @ train(gradients), rtol=1e-2)


def test_roots_are_kept_between_updates():
    """Due at multiples of update_freq and, early, four times per power of two; otherwise kept."""
    p = nn.Parameter(torch.ones(4))
    optimizer = torchium.Adagrad([p], full_matrix=True, update_freq=5)
    due, previous = [], None
    for step in range(1, 12):
        set_gradients([p], step)
        optimizer.step()
        root = optimizer.state[p]["roots.0"].clone()
        if previous is None or not torch.equal(root, previous):
            due.append(step)
        previous = root
    assert due == [1, 2, 3, 4, 5, 6, 7, 8, 10]


@pytest.mark.cuda
def test_capture_of_the_full_matrix_form_raises():
    p = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torchium.Adagrad([p], full_matrix=True)
    set_gradients([p], 0)
    optimizer.step()
    before = values(nn.ParameterList([p]))
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert_same(values(nn.ParameterList([p])), before)
