"""The ConvNet of the examples on Fashion-MNIST."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from shared.common import ROOT
from torch import Tensor, nn

from learning.optimizers import ADAMW_OPTIONS, against_adamw
from learning.task import Settings, Task

sys.path.append(str(ROOT / "examples" / "python"))
from classifiers import evaluate, make_model
from image_data import ImageData, load_image_data


def load_images(name: str, folder: Path | None) -> ImageData:
    """Raises FileNotFoundError if `folder` lacks a file, or without `folder`, if none is available."""
    return load_image_data(name, folder, ROOT / ".data" / "fashion-mnist")


class ConvNetTask(Task):
    """Shuffled batches of the training images; the test images are held out."""

    name = "convnet"
    title = "A ConvNet"
    network = "convnet"  # of the examples
    loss_unit = "nats per image"
    settings = Settings(batch=128)
    grids = against_adamw(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)

    def __init__(self, data: ImageData, device: str) -> None:
        self.data = data.to(torch.device(device))
        self.device = self.data.train_images.device

    def model(self) -> nn.Sequential:
        return make_model(self.network, self.data.image_shape)

    def hidden(self, model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.dim() >= 2][1:-1]

    def draw(self, steps: int, batch: int, seed: int) -> Tensor:
        """Every epoch has a new order and drops the incomplete last batch."""
        generator = torch.Generator().manual_seed(seed)
        count = len(self.data.train_labels)
        batches = count // batch
        epochs = [
            torch.randperm(count, generator=generator)[: batches * batch]
            for _ in range(math.ceil(steps / batches))
        ]
        return torch.cat(epochs).view(-1, batch)[:steps].to(self.device)

    def loss(self, model: nn.Module, places: Tensor) -> Tensor:
        logits = model(self.data.train_images[places])
        return nn.functional.cross_entropy(logits, self.data.train_labels[places])

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        return evaluate(model, self.data.test_images, self.data.test_labels)

    def describe(self, settings: Settings) -> str:
        data = self.data
        parameters = sum(p.numel() for p in self.model().parameters())
        return (
            f"Two convolutions and two linear layers, {parameters / 1e3:.3g} k parameters, on "
            f"{data.name}; {settings.batch} images per step; float32. "
            f"{len(data.train_labels):,} images to train on, {len(data.test_labels):,} to validate "
            "on. Muon takes the second convolution, as a matrix with one row per output channel, and "
            f"the first linear layer. {ADAMW_OPTIONS}"
        )
