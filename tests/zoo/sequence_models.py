"""Recurrent networks, attention and convolutions over a sequence, of stock layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from learnable_data import CLASSES, clusters, next_words, texts, word_loss
from task import Size, Task, cross_entropy, of_outputs
from torch import Tensor, nn


class RecurrentClassifier(nn.Module):
    """Reads a text word by word; the last state predicts the class."""

    def __init__(self, cell: type[nn.RNNBase], vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = cell(width, width, num_layers=layers, batch_first=True)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(words))
        return self.classifier(states[:, -1])


def _recurrent(cell: type[nn.RNNBase]) -> Callable[[Size], Task]:
    def build(size: Size) -> Task:
        vocabulary = size.of(60, 2_000)
        model = RecurrentClassifier(cell, vocabulary, size.of(8, 64), size.of(1, 2))
        return Task(model, texts(vocabulary, size.of(6, 24), 32), cross_entropy, fall=0.05)

    return build


class TimeFirstTagger(nn.Module):
    """A bidirectional network over [time, batch, feature], PyTorch's own order."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(features, width, bidirectional=True)
        self.tags = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # [time, batch, feature]
        return self.tags(self.recurrent(x)[0]).flatten(0, 1)


def time_first_gru(size: Size) -> Task:
    features, length, samples = 5, size.of(6, 20), size.of(8, 32)
    batches = [
        (inputs.unflatten(0, (length, samples)), targets)
        for inputs, targets in clusters((features,), length * samples)
    ]
    return Task(TimeFirstTagger(features, size.of(8, 64)), batches, cross_entropy, fall=0.05)


class EncoderClassifier(nn.Module):
    """A stock Transformer encoder on embeddings of words and positions."""

    def __init__(
        self, vocabulary: int, width: int, length: int, layers: int, batch_first: bool
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=batch_first, norm_first=batch_first
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        positions = torch.arange(words.shape[1], device=words.device).expand_as(words)
        x = self.words(words) + self.positions(positions)
        if not self.batch_first:
            return self.classifier(self.encoder(x.transpose(0, 1)).mean(0))
        return self.classifier(self.encoder(x).mean(1))


def _encoder(batch_first: bool) -> Callable[[Size], Task]:
    def build(size: Size) -> Task:
        vocabulary, length = size.of(60, 2_000), size.of(6, 24)
        model = EncoderClassifier(vocabulary, size.of(8, 64), length, size.of(1, 2), batch_first)
        return Task(model, texts(vocabulary, length, 16), cross_entropy, fall=0.05)

    return build


class AttentionLanguageModel(nn.Module):
    """One causal nn.MultiheadAttention between embedding and head."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        y = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        return self.head(x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0])


def attention(size: Size) -> Task:
    vocabulary = size.of(40, 2_000)
    batches = next_words(vocabulary, size.of(6, 32), size.of(8, 16))
    model = AttentionLanguageModel(vocabulary, size.of(8, 64))
    return Task(model, batches, of_outputs(word_loss), fall=0.05)


class TextConvolution(nn.Module):
    """Windows of three words, and the largest response of each filter."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.windows = nn.Conv1d(width, 2 * width, 3, padding=1)
        self.classifier = nn.Linear(2 * width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.classifier(self.windows(self.words(words).mT).relu().amax(2))


def conv1d(size: Size) -> Task:
    vocabulary = size.of(60, 2_000)
    model = TextConvolution(vocabulary, size.of(8, 64))
    return Task(model, texts(vocabulary, size.of(8, 24), 32), cross_entropy, fall=0.05)


KINDS: dict[str, Callable[[Size], Task]] = {
    "lstm": _recurrent(nn.LSTM),
    "gru": _recurrent(nn.GRU),
    "rnn": _recurrent(nn.RNN),
    "time_first_gru": time_first_gru,
    "encoder": _encoder(batch_first=True),
    "time_first_encoder": _encoder(batch_first=False),
    "attention": attention,
    "conv1d": conv1d,
}
