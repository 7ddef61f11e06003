"""The public functions of torchium.gradients with a model on a GPU: no waits, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_waits import no_waits
from torch import Tensor, nn
from torchium import gradients
from torchium._per_sample import layers

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
SAMPLES = 12


class Words(nn.Module):
    """vmap tracks the samples of this model; the others are called with the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.table(x)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(SAMPLES, 8, device=DEVICE)),
    "convolutions": (convolutions, lambda: torch.randn(SAMPLES, 2, 6, 6, device=DEVICE)),
    "words": (Words, lambda: torch.randint(9, (SAMPLES, 4), device=DEVICE)),
}


def norms(model: nn.Module, *batch: Any) -> list[Tensor]:
    return [gradients.per_sample_norms(model, *batch)]


def rows(model: nn.Module, *batch: Any) -> list[Tensor]:
    return list(gradients.per_sample_gradients(model, *batch).values())


def early_rows(model: nn.Module, *batch: Any) -> list[Tensor]:
    with mock.patch.object(layers, "_has_large_rows", return_value=True):
        return rows(model, *batch)


def gram(model: nn.Module, *batch: Any) -> list[Tensor]:
    return [gradients.gram(model, *batch)]


def dots(model: nn.Module, *batch: Any) -> list[Tensor]:
    return [gradients.jvp_dots(model, *batch, dict(model.named_parameters()))]


def clipped_sums(model: nn.Module, *batch: Any) -> list[Tensor]:
    for p in model.parameters():
        p.grad.zero_()
    found = gradients.clip_and_accumulate(model, *batch, 0.1)
    return [found, *(p.grad for p in model.parameters())]


def block(model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    with gradients.per_sample(model):
        loss_fn(model(x), y).backward()
    return [p.grad_sample for p in model.parameters()]


def case(name: str) -> tuple[nn.Module, Callable[[], Tensor], tuple[Any, Tensor, Tensor]]:
    """The model, what makes other inputs, and the batch."""
    make, make_inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().to(DEVICE)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    y = torch.randint(5, (SAMPLES,), device=DEVICE)
    return model, make_inputs, (nn.functional.cross_entropy, make_inputs(), y)


FUNCTIONS = [rows, early_rows, norms, gram, dots, clipped_sums, block]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_host_does_not_wait(name, function):
    model, _, batch = case(name)
    expected = [t.clone() for t in function(model, *batch)]  # compiles kernels, and may wait
    with no_waits() as asleep:
        found = function(model, *batch)
        assert not asleep.query()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", FUNCTIONS[:-1])
@pytest.mark.parametrize("name", MODELS)
def test_a_cuda_graph_captures_it(name, function):
    model, make_inputs, batch = case(name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function(model, *batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(model, *batch)
    batch[1].copy_(make_inputs())
    graph.replay()
    found = [t.clone() for t in captured]
    torch.testing.assert_close(found, function(model, *batch))
