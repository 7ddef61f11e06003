"""A Transformer that predicts the next character, and the text it is trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Shape:
    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256


class Layer(nn.Module):
    """Pre-norm causal attention and a GELU MLP of four times the width.

    Queries, keys and values have weights of their own, so that each is a matrix of its own to an
    optimizer that preconditions matrices.
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
                # What is added to the residual stream is smaller, the more layers add to it.
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


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy in nats a character; with bfloat16 products on a CUDA device."""
    # Without a cache of weights in bfloat16, which a captured graph could not renew.
    with torch.autocast(x.device.type, torch.bfloat16, x.is_cuda, cache_enabled=False):
        logits = model(x)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


class Text:
    """A text on a device: its first part for training, the last tenth for validation."""

    def __init__(self, text: bytes, device: str) -> None:
        symbols, characters = torch.frombuffer(bytearray(text), dtype=torch.uint8).unique(
            return_inverse=True
        )
        self.symbols = len(symbols)
        split = round((1 - VALIDATION_SHARE) * len(characters))
        characters = characters.to(device)
        self.train, self.validation = characters[:split], characters[split:]

    def starts(self, steps: int, batch: int, context: int, seed: int) -> Tensor:
        """Where the sequences of every batch of a run begin: [steps, batch]."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self.train) - context - 1
        drawn = torch.randint(last + 1, (steps, batch), generator=generator)
        return drawn.to(self.train.device)

    def batch(self, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Sequences [batch, context] and the characters that follow theirs."""
        places = starts[:, None] + torch.arange(context + 1, device=starts.device)
        sequences = self.train[places]
        return sequences[:, :-1], sequences[:, 1:]

    @torch.no_grad()
    def validation_loss(self, model: nn.Module, context: int, batch: int = 256) -> Tensor:
        """The mean over the whole validation text, cut into sequences that do not overlap."""
        count = (len(self.validation) - 1) // context
        x = self.validation[: count * context].view(count, context)
        y = self.validation[1 : count * context + 1].view(count, context)
        parts = zip(x.split(batch), y.split(batch), strict=True)
        return torch.stack([loss_of(model, a, b) * len(a) for a, b in parts]).sum() / count
