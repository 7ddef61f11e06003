"""Shapes of real models and gradients with decaying spectra, for the step benchmark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from networks.transformer_model import Shape, Transformer
from torch import Tensor, nn

BIBLE_SYMBOLS = 73
SETS = 4  # consecutive gradients


@dataclass(frozen=True)
class Model:
    name: str
    shapes: list[tuple[int, ...]]
    block_size: int = 1024

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes))


def llama(layers: int, width: int, mlp: int) -> list[tuple[int, ...]]:
    """Attention, gated MLP and two norms per layer."""
    attention = [(width, width)] * 4
    return [*attention, (mlp, width), (mlp, width), (width, mlp), (width,), (width,)] * layers


def resnet(
    stages: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
) -> list[tuple[int, ...]]:
    """ResNet-50, He et al. 2015: convolutions without biases, each with the scale and shift of its norm."""

    def convolution(outputs: int, inputs: int, size: int) -> Iterator[tuple[int, ...]]:
        yield from ((outputs, inputs, size, size), (outputs,), (outputs,))

    shapes = [*convolution(width, 3, 7)]
    inputs = width
    for stage, blocks in enumerate(stages):
        middle = width * 2**stage
        outputs = 4 * middle
        for block in range(blocks):
            shapes += convolution(middle, inputs, 1)
            shapes += convolution(middle, middle, 3)
            shapes += convolution(outputs, middle, 1)
            if block == 0:
                shapes += convolution(outputs, inputs, 1)
            inputs = outputs
    return [*shapes, (classes, inputs), (classes,)]


def mlp(*widths: int) -> list[tuple[int, ...]]:
    pairs = itertools.pairwise(widths)
    return [shape for a, b in pairs for shape in ((b, a), (b,))]


def transformer(shape: Shape) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in Transformer(BIBLE_SYMBOLS, shape).parameters()]


MODELS = {
    "llama-103m": Model("two Llama layers of width 2048", llama(2, 2048, 5632)),
    "llama-308m": Model("24 Llama layers of width 1024", llama(24, 1024, 2816)),
    "resnet-50": Model("ResNet-50", resnet()),
    "transformer": Model("character Transformer", transformer(Shape())),
    "mlp": Model("MLP 784-512-512-10", mlp(784, 512, 512, 10)),
}
TINY_MODELS = {
    "llama-103m": Model("two Llama layers of width 24", llama(2, 24, 40), 16),
    "llama-308m": Model("three Llama layers of width 16", llama(3, 16, 24), 16),
    "resnet-50": Model("bottleneck ResNet of width 2", resnet((1, 1), 2, 10), 16),
    "transformer": Model("small character Transformer", transformer(Shape(1, 16, 2, 8)), 16),
    "mlp": Model("MLP 12-8-8-3", mlp(12, 8, 8, 3), 16),
}


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A convolution as a matrix: outputs by everything else."""
    return shape[0], math.prod(shape[1:])


def decaying(shape: tuple[int, ...], exponent: float, device: str, rank: int = 256) -> Tensor:
    """A gradient with singular values of about i^-exponent up to `rank`, and noise at the last one.

    Vectors are normal.
    """
    if len(shape) < 2:
        return torch.randn(shape, device=device)
    m, n = matrix_shape(shape)
    rank = min(rank, m, n)
    values = torch.arange(1, rank + 1, device=device) ** -exponent
    left = torch.randn(m, rank, device=device) / math.sqrt(m)
    right = torch.randn(rank, n, device=device) / math.sqrt(n)
    noise = float(values[-1]) / (math.sqrt(m) + math.sqrt(n)) * torch.randn(m, n, device=device)
    return torch.addmm(noise, left * values, right).view(shape)


class Gradients:
    """Parameters, and a few sets of their gradients, used in turn."""

    def __init__(self, model: Model, exponents: tuple[float, ...], device: str) -> None:
        self.parameters = [nn.Parameter(torch.randn(s, device=device)) for s in model.shapes]
        self._targets = [torch.zeros_like(p) for p in self.parameters]
        for p, g in zip(self.parameters, self._targets, strict=True):
            p.grad = g
        self._sets = {
            exponent: [
                [decaying(shape, exponent, device) for shape in model.shapes] for _ in range(SETS)
            ]
            for exponent in exponents
        }

    def feed(self, exponent: float, step: int) -> None:
        """Write a step's gradients in place, as a captured graph needs them."""
        torch._foreach_copy_(self._targets, self._sets[exponent][step % SETS])

    def of(self, exponent: float, index: int) -> list[Tensor]:
        """All sets of one parameter's gradient."""
        return [gradients[index] for gradients in self._sets[exponent]]
