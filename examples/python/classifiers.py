"""The two networks of the examples, and their evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 10
MODELS = ("mlp", "convnet")


def make_model(name: str, image_shape: tuple[int, int, int]) -> nn.Sequential:
    """Builds "mlp" or "convnet" for images of `image_shape` = (channels, height, width)."""
    channels, height, width = image_shape
    if name == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * height * width, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, CLASSES),
        )
    if name == "convnet":
        return nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (height // 4) * (width // 4), 128),
            nn.ReLU(),
            nn.Linear(128, CLASSES),
        )
    raise ValueError(f"model is '{name}'; it must be one of {', '.join(MODELS)}.")


@torch.no_grad()
def evaluate(
    model: nn.Module, images: Tensor, labels: Tensor, batch_size: int = 1000
) -> tuple[float, float]:
    """Mean cross entropy and accuracy of `model` on `images` [N, ...] and `labels` [N]."""
    training = model.training
    model.eval()
    loss, correct = 0.0, 0
    for image_batch, label_batch in zip(
        images.split(batch_size), labels.split(batch_size), strict=True
    ):
        logits = model(image_batch)
        loss += nn.functional.cross_entropy(logits, label_batch, reduction="sum").item()
        correct += (logits.argmax(dim=1) == label_batch).sum().item()
    model.train(training)
    return loss / len(labels), correct / len(labels)
