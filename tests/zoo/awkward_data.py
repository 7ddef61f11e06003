"""Small models of stock layers on data that is sparse, empty, equal, huge or tiny."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from learnable_data import CLASSES, clusters, next_words, texts, word_loss
from task import Batch, Size, Task, cross_entropy, of_outputs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer


def perceptron(inputs: int, hidden: int, classes: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def mlp(size: Size) -> Task:
    features = size.of(12, 200)
    return Task(
        perceptron(features, size.of(16, 256)),
        clusters((features,), size.of(16, 128)),
        cross_entropy,
    )


class TextClassifier(nn.Module):
    """The mean of the embeddings of all words, and a hidden layer."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.classifier = perceptron(width, width)

    def forward(self, words: Tensor) -> Tensor:
        return self.classifier(self.embedding(words).mean(1))


def embedding(size: Size) -> Task:
    vocabulary = size.of(500, 50_000)
    model = TextClassifier(vocabulary, size.of(8, 16))
    return Task(model, texts(vocabulary, 12, 32), cross_entropy, fall=0.05)


class TiedLanguageModel(nn.Module):
    """Predicts the next word with the table that words are looked up in."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(words))))


def tied_embedding(size: Size) -> Task:
    vocabulary = size.of(200, 10_000)
    batches = next_words(vocabulary, size.of(6, 32), size.of(8, 16))
    return Task(
        TiedLanguageModel(vocabulary, size.of(8, 32)), batches, of_outputs(word_loss), fall=0.02
    )


def bag_of_words(size: Size) -> Task:
    vocabulary = size.of(300, 3_000)
    batches = [
        (F.one_hot(words, vocabulary).sum(1).float(), targets)
        for words, targets in texts(vocabulary, 12, 32)
    ]
    return Task(perceptron(vocabulary, size.of(8, 64)), batches, cross_entropy)


def one_hot(size: Size) -> Task:
    """Four categories, each a one-hot vector of its own."""
    values = size.of(20, 500)
    batches = [
        (F.one_hot(words % values, values).flatten(1).float(), targets)
        for words, targets in texts(values, 4, 32)
    ]
    return Task(perceptron(4 * values, size.of(16, 64)), batches, cross_entropy)


def zeros(size: Size) -> Task:
    """Two thirds of the features and half of the units are always zero."""
    features, hidden = size.of(30, 600), size.of(16, 256)
    model = perceptron(features, hidden)
    nn.init.constant_(model[0].bias[::2], -100.0)
    batches = clusters((features,), 32)
    for inputs, _ in batches:
        inputs[:, features // 3 :] = 0.0
    return Task(model, batches, cross_entropy)


def one_sample(size: Size) -> Task:
    features = size.of(8, 100)
    batches = clusters((features,), samples=1, batches=8)
    return Task(perceptron(features, size.of(16, 128)), batches, cross_entropy, fall=0.05)


def equal_rows(size: Size) -> Task:
    features = size.of(8, 100)
    batches = [
        (inputs.expand(16, -1).clone(), targets.expand(16).clone())
        for inputs, targets in clusters((features,), samples=1)
    ]
    # One sample a batch says little of the others.
    return Task(perceptron(features, size.of(16, 128)), batches, cross_entropy, fall=0.03)


def inputs_1e8(size: Size) -> Task:
    """The norm behind the first layer takes the scale away: its gradients are ordinary numbers."""
    features, hidden = size.of(10, 100), size.of(16, 128)
    model = nn.Sequential(
        nn.Linear(features, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )
    batches = [(1e8 * inputs, targets) for inputs, targets in clusters((features,), 32)]
    return Task(model, batches, cross_entropy)


def inputs_1e_9(size: Size) -> Task:
    """Only the biases can learn, the frequencies of the classes."""
    features = size.of(10, 100)
    batches = [(1e-9 * inputs, targets) for inputs, targets in clusters((features,), 32)]
    return Task(perceptron(features, size.of(16, 128)), batches, cross_entropy, fall=0.03)


def spiked_step(task: Task, optimizers: list[Optimizer], index: int) -> None:
    """Two of the steps have finite gradients whose squares are not."""
    (optimizer,) = optimizers
    optimizer.zero_grad()
    spike = 1e20 if index in (0, 17) else 1.0
    (task.loss(task.model, task.batch(index)) * spike).backward()
    optimizer.step()


def gradients_1e20(size: Size) -> Task:
    return replace(mlp(size), step=spiked_step)


def narrow_layers(size: Size) -> Task:
    """Twenty layers of four units."""
    layers: list[nn.Module] = [nn.Linear(6, 4)]
    for _ in range(20):
        layers += [nn.Tanh(), nn.Linear(4, 4)]
        nn.init.orthogonal_(layers[-1].weight, gain=1.6)
    return Task(nn.Sequential(*layers), clusters((6,), size.of(32, 128)), cross_entropy)


def batch_norm(size: Size) -> Task:
    features, hidden = size.of(12, 200), size.of(16, 256)
    model = nn.Sequential(
        nn.Linear(features, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )
    return Task(model, clusters((features,), 32), cross_entropy)


class ClickModel(nn.Module):
    """Categories in tables of their own, a bag of clicks, numbers through a network, products of all."""

    def __init__(self, rows: list[int], numbers: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        self.clicks = nn.EmbeddingBag(rows[0], width, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(numbers, width), nn.ReLU(), nn.Linear(width, width))
        vectors = len(rows) + 2
        self.top = perceptron(width + vectors * (vectors - 1) // 2, width, classes=1)

    def forward(self, categories: Tensor, clicks: Tensor, numbers: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        looked_up = [table(column) for table, column in zip(self.tables, categories.T, strict=True)]
        vectors = torch.stack([dense, self.clicks(clicks), *looked_up], 1)
        first, second = torch.triu_indices(*vectors.shape[1:2] * 2, offset=1)
        products = (vectors @ vectors.mT)[:, first, second]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


def click_batch(rows: list[int], numbers: int, samples: int) -> Batch:
    columns = [(count * torch.rand(samples) ** 3).long() for count in rows]
    dense = torch.randn(samples, numbers)
    clicked = ((columns[0] % 2 == 0) & (dense[:, 0] < 0.5)).float()
    return torch.stack(columns, 1), torch.randint(rows[0], (samples, 5)), dense, clicked


def click_rate(size: Size) -> Task:
    rows = [size.of(50, 10_000), size.of(10, 1000), 3]
    batches = [click_batch(rows, 4, size.of(32, 256)) for _ in range(4)]
    loss = of_outputs(F.binary_cross_entropy_with_logits)
    return Task(ClickModel(rows, 4, size.of(8, 16)), batches, loss, fall=0.05)


KINDS: dict[str, Callable[[Size], Task]] = {
    "mlp": mlp,
    "embedding": embedding,
    "tied_embedding": tied_embedding,
    "bag_of_words": bag_of_words,
    "one_hot": one_hot,
    "zeros": zeros,
    "one_sample": one_sample,
    "equal_rows": equal_rows,
    "inputs_1e8": inputs_1e8,
    "inputs_1e_9": inputs_1e_9,
    "gradients_1e20": gradients_1e20,
    "narrow_layers": narrow_layers,
    "batch_norm": batch_norm,
    "click_rate": click_rate,
}
