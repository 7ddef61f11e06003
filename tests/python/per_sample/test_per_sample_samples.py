"""torchium.per_sample_gradients tracks samples wherever a model moves them."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable

import pytest
import torch
import torchium
from reference.per_sample import per_sample_gradients as reference_gradients
from torch import Tensor, nn
from torch.nn import functional as F

Forward = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """Layers for functions of sequences [samples, time, 4]."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.positions = nn.LayerNorm(4), nn.Embedding(8, 4)
        self.convolution, self.group = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.register_buffer("grid", torch.randn(1, 8, 4))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def time_first(m: Layers, x: Tensor) -> Tensor:
    """Every layer sees [time, samples, 4], as in a recurrent model."""
    x = x.transpose(0, 1)
    return m.norm(m.b(torch.tanh(m.a(x)))).sum(0)


def recurrent_cell(m: Layers, x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, 0])
    for step in m.a(x.transpose(0, 1)):
        state = torch.tanh(step + m.b(state))
    return state


def last_step(m: Layers, x: Tensor) -> Tensor:
    return m.a(x.transpose(0, 1))[-1]


def in_reverse_and_back(m: Layers, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x.flip(0)))).flip(0).sum(1)


def sorted_by_length_and_back(m: Layers, x: Tensor) -> Tensor:
    order = x.sum((1, 2)).argsort(descending=True)
    return m.b(torch.tanh(m.a(x[order])))[order.argsort()].sum(1)


def in_reverse(m: Layers, x: Tensor) -> Tensor:
    return m.a(x.flip(0)).sum(1)


def rolled(m: Layers, x: Tensor) -> Tensor:
    return m.b(m.a(x).roll(1, 0)).sum(1)


def centred(m: Layers, x: Tensor) -> Tensor:
    """Zero for a batch of one."""
    return m.a(torch.exp(x - x.mean(0))).sum(1)


def attention_over_samples(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x.mean(1))
    return m.b((y @ y.T).softmax(1) @ y)


def shared_positions(m: Layers, x: Tensor) -> Tensor:
    return m.a(x + m.positions(torch.arange(x.shape[1], device=x.device))).relu_().sum(1)


def positions_for_a_batch_of_one(m: Layers, x: Tensor) -> Tensor:
    return m.a(x + m.positions(torch.arange(x.shape[1], device=x.device)[None])).sum(1)


def shared_coordinates(m: Layers, x: Tensor) -> Tensor:
    grid = F.relu(m.b(F.relu(m.a(m.grid), inplace=True)), inplace=True)
    return (x * m.norm(grid)[:, : x.shape[1]]).sum(1)


def folded(m: Layers, x: Tensor) -> Tensor:
    return m.a(x.reshape(-1, 4)).view(*x.shape).tanh().sum(1)


def images_in_a_fold(m: Layers, x: Tensor) -> Tensor:
    images = m.group(m.convolution(x.reshape(-1, 1, 2, 2)))
    return images.view(len(x), x.shape[1], 4, 4).square().sum((1, 3))


def sample_by_sample(m: Layers, x: Tensor) -> Tensor:
    return torch.stack([m.norm(m.a(sample)).sum(0) for sample in x])


def unused_output(m: Layers, x: Tensor) -> Tensor:
    m.b(x)
    return m.a(x).sum(1)


def dead_units(m: Layers, x: Tensor) -> Tensor:
    return m.b(F.relu(m.a(x.flip(0)) - 1.0)).flip(0).sum(1)


def samples_in_between(m: Layers, x: Tensor) -> Tensor:
    return m.a(x.permute(1, 0, 2)[None]).sum((0, 1))


FORWARDS = [
    time_first,
    recurrent_cell,
    last_step,
    in_reverse_and_back,
    sorted_by_length_and_back,
    in_reverse,
    rolled,
    centred,
    attention_over_samples,
    shared_positions,
    positions_for_a_batch_of_one,
    shared_coordinates,
    folded,
    images_in_a_fold,
    sample_by_sample,
    unused_output,
    dead_units,
    samples_in_between,
]


def assert_right(model: nn.Module, x: Tensor, loss=F.cross_entropy) -> None:
    targets = torch.randint(4, (len(x),), device=x.device)
    expected = reference_gradients(model, loss, x, targets)
    gradients = torchium.per_sample_gradients(model, loss, x, targets)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("samples", "time"), [(5, 5), (1, 1), (1, 3), (2, 2), (4, 3)])
def test_samples_are_known_wherever_the_model_moves_them(forward, samples, time, device):
    torch.manual_seed(0)
    model = Layers(forward).to(device).double()
    x = torch.randn(samples, time, 4, dtype=torch.float64, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none takes one pass per sample
        assert_right(model, x)


def test_equal_samples_with_different_targets():
    """Only the targets identify the sample of a row."""
    torch.manual_seed(0)
    model = Layers(in_reverse_and_back).double()
    assert_right(model, torch.randn(1, 3, 4).double().expand(5, 3, 4))


@pytest.mark.parametrize("way", ["layers", "functions", "one_by_one"])
def test_rows_are_plain_tensors(way):
    modules = {"layers": nn.Identity(), "functions": nn.PReLU(), "one_by_one": nn.LSTM(3, 3)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.then = nn.Linear(4, 3), modules[way]

        def forward(self, x: Tensor) -> Tensor:
            y = self.then(self.layer(x))
            return y[0] if isinstance(y, tuple) else y

    scale = torch.ones((), requires_grad=True)  # of the loss, not of the model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = torchium.per_sample_gradients(
            Model(),
            lambda o, t: F.cross_entropy(o * scale, t),
            torch.randn(5, 4, requires_grad=True),
            torch.randint(3, (5,)),
        )
    for row in rows.values():
        assert not row.requires_grad
        assert row.is_leaf
        row.numpy()
        assert torch.equal(copy.deepcopy(row), pickle.loads(pickle.dumps(row)))
    assert scale.grad is None


# ---- random models

Step = Callable[[Layers, Tensor], Tensor]
STEPS: list[Step] = [
    lambda m, x: m.a(x),
    lambda m, x: m.b(x),
    lambda m, x: m.norm(x),
    lambda m, x: torch.tanh(x),
    lambda m, x: F.relu(x),
    lambda m, x: m.a(x).relu_(),
    lambda m, x: m.a(x).transpose(0, 1).contiguous().mul_(0.5).transpose(0, 1),
    lambda m, x: m.b(x.transpose(0, 1)).transpose(0, 1),
    lambda m, x: torch.tanh(m.a(x.transpose(0, 2))).transpose(0, 2) if x.shape[0] == 4 else x,
    lambda m, x: m.a(x.flip(0)).flip(0),
    lambda m, x: m.b(x.flip(0)),
    lambda m, x: m.norm(x.roll(1, 0)),
    lambda m, x: m.a(x - x.mean(0)),
    lambda m, x: x + m.b(x).sum(1, keepdim=True),
    lambda m, x: x + m.a(x).sum(0, keepdim=True),
    lambda m, x: x + m.positions(torch.arange(x.shape[1], device=x.device)),
    lambda m, x: m.positions(x.argmax(2)),
    lambda m, x: x * m.a(m.grid[:, : x.shape[1]]),
    lambda m, x: (m.b(x), x)[1],
    lambda m, x: m.a(x.reshape(-1, 4)).view_as(x),
    lambda m, x: m.convolution(x.unsqueeze(1)).mean(1),
    lambda m, x: m.group(m.convolution(x.reshape(-1, 1, 2, 2))).mean((2, 3)).view_as(x),
    lambda m, x: F.linear(x, m.b.weight),
    lambda m, x: x[x.sum((1, 2)).argsort()],
]


@pytest.mark.parametrize("seed", range(60))
def test_random_models(seed):
    """A model that mixes samples gets the gradients of batches of one."""
    drawn = random.Random(seed)
    steps = drawn.choices(STEPS, k=drawn.randint(1, 5))

    def forward(m: Layers, x: Tensor) -> Tensor:
        for step in steps:
            x = step(m, x)
        return x.sum(1)

    torch.manual_seed(seed)
    samples = drawn.randint(1, 5)
    x = torch.randn(samples, drawn.choice([samples, samples, 1, 3]), 4).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_right(Layers(forward).double(), x)
