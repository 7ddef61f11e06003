"""A Transformer that predicts the next character."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256


class Layer(nn.Module):
    """Pre-norm causal attention and a GELU MLP of four times the width.

    Queries, keys and values have separate weights, so that an optimizer preconditions each as a matrix.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query, self.key, self.value, self.projection = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (
            matrix(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for matrix in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Characters [batch, context] -> logits [batch, context, symbols]; learned positions."""

    def __init__(self, symbols: int, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, symbols, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # The more layers add to the residual stream, the smaller their initial contributions.
                is_residual = name.endswith(("projection.weight", "down.weight"))
                shrink = math.sqrt(2 * shape.layers) if is_residual else 1.0
                nn.init.normal_(p, std=0.02 / shrink)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.positions.weight[: x.shape[-1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The matrices between the embeddings and the head."""
        return [p for p in self.layers.parameters() if p.dim() == 2]
