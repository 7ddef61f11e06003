"""torchium.per_sample_gradients with other threads, and its detection of random numbers."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torchium
from optimizer_cases import assert_same
from torch import Tensor, nn
from torch.nn import functional as F


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x[:, None])[0][:, 0])


class Noisy(LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x))


MODELS = {
    "one_pass": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)),
    "vmap": lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 4)),
    "one_by_one": LSTM,
}


def model_and_batch(way: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return MODELS[way](), torch.randn(8, 6), torch.randint(4, (8,))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "per_sample_gradients takes the samples one by one")
        yield


@contextmanager
def drawing_thread(drawn: list[float]) -> Iterator[None]:
    """A thread that draws random numbers continuously, like a prefetching loader."""
    stop = threading.Event()

    def draw() -> None:
        while not stop.wait(1e-5):
            drawn.append(torch.rand((), dtype=torch.float64).item())

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("way", MODELS)
def test_another_thread_may_draw_random_numbers(way):
    model, x, y = model_and_batch(way)
    expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    drawn: list[float] = []
    with drawing_thread(drawn):
        for _ in range(20):
            assert_same(torchium.per_sample_gradients(model, F.cross_entropy, x, y), expected)
    assert len(drawn) == len(set(drawn)) > 10


def test_own_random_numbers_are_refused_beside_a_thread_that_draws():
    _, x, y = model_and_batch("one_by_one")
    drawn: list[float] = []
    with drawing_thread(drawn):
        for _ in range(20):
            with pytest.raises(ValueError, match="draws random numbers"):
                torchium.per_sample_gradients(Noisy(), F.cross_entropy, x, y)
    assert len(drawn) == len(set(drawn))


NOISE = {
    "randn": lambda o: o + torch.randn(4),
    "rand_like": lambda o: o + torch.rand_like(o),
    "normal_": lambda o: o + torch.empty(4).normal_(),
    "exponential_": lambda o: o + torch.ones(4).exponential_(),
    "bernoulli": lambda o: o * torch.bernoulli(torch.full((4,), 0.5)),
    "randperm": lambda o: o[:, torch.randperm(4)],
    "multinomial": lambda o: o[:, torch.multinomial(torch.ones(4), 4)],
    "dropout": F.dropout,
    "rrelu": lambda o: F.rrelu(o, training=True),
    "own_generator": lambda o: o + torch.randn(4, generator=torch.Generator()),
    "attention": lambda o: F.scaled_dot_product_attention(*[o[None]] * 3, dropout_p=0.5)[0],
}


@pytest.mark.parametrize("way", MODELS)
@pytest.mark.parametrize("noise", NOISE)
def test_every_way_sees_all_random_numbers(way, noise, device):
    model, x, y = (t.to(device) for t in model_and_batch(way))
    state = torch.get_rng_state()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with torch.device(device):
            return F.cross_entropy(NOISE[noise](output), target)

    if noise == "own_generator" and device.type == "cuda":
        pytest.skip("the generator of this case is of the CPU")
    with pytest.raises(ValueError, match="draws random numbers"):
        torchium.per_sample_gradients(model, loss, x, y)
    assert torch.equal(torch.get_rng_state(), state)


NO_NOISE = {
    "dropout": lambda o: F.dropout(o, 0.5, training=False),
    "dropout_of_0": lambda o: F.dropout(o, 0.0),
    "rrelu": F.rrelu,
    "attention": lambda o: F.scaled_dot_product_attention(*[o[None]] * 3)[0],
}


@pytest.mark.parametrize("way", MODELS)
@pytest.mark.parametrize("function", NO_NOISE)
def test_what_draws_nothing_is_taken(way, function, device):
    model, x, y = (t.to(device) for t in model_and_batch(way))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(NO_NOISE[function](output), target)

    rows = torchium.per_sample_gradients(model, loss, x, y)
    gradients = torch.autograd.grad(loss(model(x[:1]), y[:1]), [*model.parameters()])
    for row, gradient in zip(rows.values(), gradients, strict=True):
        torch.testing.assert_close(row[0], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", MODELS)
def test_one_model_in_several_threads(way):
    model, x, y = model_and_batch(way)
    names = [n for n, _ in model.named_parameters()]
    expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    parameters = list(model.parameters())

    def call(index: int) -> dict[str, Tensor]:
        # A part of the model has the same layers.
        if index % 4 == 3 and way != "one_by_one":
            torchium.per_sample_gradients(model[0], lambda o, t: o.sum(), x, None)
        return torchium.per_sample_gradients(model, F.cross_entropy, x, y)

    with ThreadPoolExecutor(4) as executor:
        for gradients in executor.map(call, range(24)):
            assert_same(gradients, expected)
    assert [n for n, _ in model.named_parameters()] == names
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert not any(m._forward_hooks for m in model.modules())


def test_an_error_in_a_thread_gives_the_parameters_back():
    model, x, y = model_and_batch("one_pass")
    parameters = list(model.parameters())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise LookupError("of the loss")

    def call(_: int) -> None:
        with pytest.raises(LookupError, match="of the loss"):
            torchium.per_sample_gradients(model, loss, x, y)

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(call, range(8)))
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    torchium.per_sample_gradients(model, F.cross_entropy, x, y)  # nothing is locked
