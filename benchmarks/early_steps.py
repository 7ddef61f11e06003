"""Shampoo.from_adamw against AdamW at AdamW's learning rates, from the first steps on.

Training loss of small classifiers with a constant learning rate, and validation loss of the character
Transformer with its schedule, after 50, 100, 300 and 1,000 steps. The target: never behind AdamW.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchium
from learning.bible_text import load_bible
from learning.convnet_task import ConvNetTask, load_images
from learning.optimizers import adamw
from learning.task import Settings
from learning.transformer_task import TransformerTask
from networks.transformer_model import Shape
from shared.common import ROOT, Report
from torch import nn
from torch.optim import Optimizer

sys.path.append(str(ROOT / "examples" / "python"))
from classifiers import evaluate, make_model
from image_data import ImageData

MARKS = (50, 100, 300, 1000)
LOSS_IMAGES = 5000
# AdamW's default rate, and approximately its best in runs this short.
RATES = {
    "digits-small": (1e-3, 3e-3),
    "digits-convnet": (1e-3, 4e-3),
    "fashion-mlp": (1e-3, 2e-3),
    "fashion-convnet": (1e-3, 8e-3),
    "transformer": (1e-3, 3e-3),
}
DATA = {"digits": "digits", "fashion": "fashion-mnist"}

Make = Callable[[nn.Module, float], Optimizer]


def optimizers(options: dict[str, Any]) -> dict[str, Make]:
    """AdamW, and the Shampoo that replaces it, with roots every 10 and every 100 steps."""

    def shampoo(update_freq: int) -> Make:
        return lambda model, lr: torchium.Shampoo.from_adamw(
            adamw(model, lr), update_freq=update_freq, **options
        )

    return {"AdamW": adamw, "from_adamw": shampoo(10), "update_freq=100": shampoo(100)}


def small_mlp(image_shape: Sequence[int]) -> nn.Sequential:
    """Few, narrow layers: the case with the least to gain early."""
    pixels = image_shape[0] * image_shape[1] * image_shape[2]
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class ImageTask(ConvNetTask):
    """One of the small classifiers; the loss is measured on the first training images."""

    def __init__(self, model_name: str, data: ImageData, device: str) -> None:
        super().__init__(data, device)
        self._model_name = model_name

    def model(self) -> nn.Sequential:
        if self._model_name == "small":
            return small_mlp(self.data.image_shape)
        return make_model(self._model_name, self.data.image_shape)

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        data = self.data
        return evaluate(model, data.train_images[:LOSS_IMAGES], data.train_labels[:LOSS_IMAGES])


def make_task(name: str, arguments: argparse.Namespace) -> ConvNetTask | TransformerTask:
    if name == TransformerTask.name:
        return TransformerTask(
            load_bible(arguments.data_dir or ROOT / ".data"), Shape(), arguments.device
        )
    data, model = name.split("-")
    return ImageTask(model, load_images(DATA[data], arguments.data_dir), arguments.device)


@dataclass
class Run:
    task: ConvNetTask | TransformerTask
    settings: Settings
    marks: Sequence[int]

    def losses(self, make: Make, lr: float, seed: int) -> list[float]:
        """The losses at the marks. The same seed gives the same weights and batches."""
        torch.manual_seed(seed)
        model = self.task.model().to(self.task.device)
        optimizer = make(model, lr)
        has_schedule = isinstance(self.task, TransformerTask)
        losses = []
        for step, places in enumerate(self.task.draw(self.marks[-1], self.settings.batch, seed)):
            optimizer.zero_grad()
            self.task.loss(model, places).backward()
            if has_schedule:
                for group in optimizer.param_groups:
                    group["lr"] = lr * self.settings.learning_rate(step)
            optimizer.step()
            if step + 1 in self.marks:
                losses.append(self.task.evaluate(model)[0])
        return losses


def compare(report: Report, name: str, arguments: argparse.Namespace) -> None:
    marks = [m for m in MARKS if m <= arguments.steps]
    task = make_task(name, arguments)
    run = Run(task, Settings(task.settings.batch, marks[-1]), marks)
    rows = []
    for lr in RATES[name]:
        means: dict[str, list[float]] = {}
        for label, make in optimizers(arguments.options).items():
            runs = [run.losses(make, lr, seed) for seed in arguments.seeds]
            means[label] = [statistics.mean(losses) for losses in zip(*runs, strict=True)]
            rows.append([label, lr, *means[label]])
        for label, losses in means.items():
            if label != "AdamW":
                worst = max(a / b for a, b in zip(losses, means["AdamW"], strict=True))
                report.check(f"{name}, lr {lr:g}, {label}: loss / AdamW's, worst", worst, 1.0)
    report.table(f"{name}, {len(arguments.seeds)} seeds", ["", "lr", *map(str, marks)], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=MARKS[-1], help="the last mark at most")
    parser.add_argument("--data-dir", type=Path, help="folder of the text or of the images")
    parser.add_argument("--save", type=Path, help="write the tables to this file")
    parser.add_argument(
        "--options",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="of from_adamw, to try others",
    )
    arguments = parser.parse_args()
    pairs = (option.split("=") for option in arguments.options)
    arguments.options = {name: ast.literal_eval(value) for name, value in pairs}
    torch.set_float32_matmul_precision("high")
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "a CPU"
    report = Report(f"The first steps of Shampoo.from_adamw on {where}")
    for name in arguments.tasks:
        compare(report, name, arguments)
    return report.finish(arguments.save)


if __name__ == "__main__":
    sys.exit(main())
