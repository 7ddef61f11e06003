"""Batches that a model can learn from; all depend on torch's seed alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

Batches = list[tuple[Tensor, Tensor]]
CLASSES = 4


def labels(count: int, classes: int = CLASSES) -> Tensor:
    """Each class is half as frequent as the one before it, so that biases alone learn something."""
    weights = 0.5 ** torch.arange(classes)
    return torch.multinomial(weights, count, replacement=True)


def clusters(
    shape: tuple[int, ...],
    samples: int = 16,
    batches: int = 4,
    classes: int = CLASSES,
    noise: float = 0.5,
) -> Batches:
    """Samples of `shape` around one centre a class."""
    centres = torch.randn(classes, *shape)
    result = []
    for _ in range(batches):
        targets = labels(samples, classes)
        result.append((centres[targets] + noise * torch.randn(samples, *shape), targets))
    return result


def images(channels: int, side: int, samples: int = 8, batches: int = 4) -> Batches:
    return clusters((channels, side, side), samples, batches)


def texts(
    vocabulary: int, length: int, samples: int = 16, batches: int = 4, classes: int = CLASSES
) -> Batches:
    """Words of skewed frequency, every other one from a few that tell the class.

    Most of a large vocabulary never occurs. The word 0 pads the end of some texts.
    """
    result = []
    for _ in range(batches):
        targets = labels(samples, classes)
        words = 1 + ((vocabulary - 1) * torch.rand(samples, length) ** 4).long()
        telling = 1 + 3 * targets[:, None] + torch.randint(3, (samples, length))
        words[:, ::2] = telling[:, ::2]
        words[::3, 3 * length // 4 :] = 0
        result.append((words.clamp_(max=vocabulary - 1), targets))
    return result


def sentences(vocabulary: int, length: int, samples: int = 8, batches: int = 4) -> list[Tensor]:
    """Each word decides the next one, mostly; only 20 words occur."""
    used = torch.randperm(vocabulary)[:20]
    following = torch.randperm(20)
    result = []
    for _ in range(batches):
        words = [torch.randint(20, (samples,))]
        for _ in range(length):
            surprise = torch.rand(samples) < 0.1
            words.append(torch.where(surprise, torch.randint(20, (samples,)), following[words[-1]]))
        result.append(used[torch.stack(words, 1)])
    return result


def next_words(vocabulary: int, length: int, samples: int = 8, batches: int = 4) -> Batches:
    """Sentences, and the word after each word of them."""
    return [(s[:, :-1], s[:, 1:]) for s in sentences(vocabulary, length, samples, batches)]


def word_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
