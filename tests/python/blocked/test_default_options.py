"""K-FAC and natural gradient with default options descend on classifiers of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
import torch
import torchium
from optimizer_cases import ignore_fallback
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 60
MORE_STEPS = {"bag_of_words": 120}  # a momentum that is too large shows late
BATCH = 32
Sampler = Callable[[torch.Generator], tuple[Tensor, Tensor]]


class Block(nn.Module):
    """A Transformer layer of linear layers."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        heads = self.projections(self.norms[0](x)).view(n, t, 3, 2, width // 2)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norms[1](x))


class Language(nn.Module):
    """An encoder that classifies sentences, or a next-word model."""

    def __init__(self, words: int, classes: int, causal: bool, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(8, width)
        self.blocks = nn.Sequential(Block(width, causal), Block(width, causal), nn.LayerNorm(width))
        self.out, self.causal = nn.Linear(width, classes), causal

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).expand(x.shape)
        x = self.blocks(self.words(x) + self.places(places))
        return self.out(x).mT if self.causal else self.out(x.mean(1))


class Residual(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)]
        )
        self.norms = nn.ModuleList([norm(8), norm(8)])
        self.out = nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norms[0](self.convs[0](x))), 2)
        x = F.relu(x + self.norms[1](self.convs[1](x)))
        return self.out(x.flatten(1))


def digits(shape: tuple[int, ...]) -> Sampler:
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).div(16).reshape(-1, *shape)
    y = torch.tensor(labels)

    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(x), (BATCH,), generator=generator)
        return x[index], y[index]

    return sample


def sentences(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The class is the most frequent of three kinds of words."""
    x = torch.randint(30, (BATCH, 8), generator=generator)
    return x, F.one_hot(x % 3, 3).sum(1).argmax(1)


def bags(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y = torch.randint(3, (BATCH,), generator=generator)
    rate = torch.where(torch.arange(600) % 3 == y[:, None], 0.03, 0.01)
    return torch.bernoulli(rate, generator=generator), y


def text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The next character of a repeated sentence."""
    characters = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. "))
    start = torch.randint(len(characters), (BATCH, 1), generator=generator)
    window = characters[(start + torch.arange(9)) % len(characters)] - 32
    return window[:, :-1], window[:, 1:]


def deep() -> nn.Module:
    layers = ([nn.Linear(64 if i == 0 else 32, 32), nn.Tanh()] for i in range(6))
    return nn.Sequential(*chain.from_iterable(layers), nn.Linear(32, 10))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


# name -> model, batches
CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Sampler]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        lambda: digits((64,)),
    ),
    "deep": (deep, lambda: digits((64,))),
    "convnet": (convnet, lambda: digits((1, 8, 8))),
    "encoder": (lambda: Language(30, 3, causal=False), lambda: sentences),
    "gpt": (lambda: Language(128, 128, causal=True), lambda: text),
    "bag_of_words": (
        lambda: nn.Sequential(nn.Linear(600, 16), nn.ReLU(), nn.Linear(16, 3)),
        lambda: bags,
    ),
    "residual": (lambda: Residual(lambda n: nn.GroupNorm(2, n)), lambda: digits((1, 8, 8))),
    "batch_norm": (lambda: Residual(nn.BatchNorm2d), lambda: digits((1, 8, 8))),
}


@ignore_fallback
@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("cls", [torchium.KFAC, torchium.NaturalGradient])
def test_the_loss_descends_without_any_option(cls, name):
    if cls is torchium.NaturalGradient and name == "batch_norm":
        pytest.skip("BatchNorm mixes samples")
    torch.manual_seed(0)
    make, batches = CLASSIFIERS[name]
    model, sample = make(), batches()
    optimizer, generator = cls(model), torch.Generator().manual_seed(0)
    losses = []
    for _ in range(MORE_STEPS.get(name, STEPS)):
        x, y = sample(generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    means = torch.tensor(losses).reshape(-1, 20).mean(1)
    assert means[-1] < 0.85 * means[0]
    assert means.max() < 1.1 * losses[0]
    assert max(losses) < 1.5 * losses[0]
