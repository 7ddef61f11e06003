"""One training run with a budget, and its records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torchium
from classifiers import evaluate, make_model
from image_data import ImageData
from torch import Tensor, nn
from tqdm import tqdm

RECORDS = 30  # points of a loss curve
LOSS_SAMPLES = 2000  # training images on which a point is measured

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Budget:
    """The limit of one run: `steps`, or `seconds` of training without evaluation."""

    steps: float = math.inf
    seconds: float = math.inf

    def progress(self, steps: int, seconds: float) -> float:
        """The fraction of the budget used, 0 to 1."""
        return min(max(steps / self.steps, seconds / self.seconds), 1.0)


@dataclass
class Result:
    """The loss curve of a run, and its last values."""

    label: str
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0

    def first_below(self, target: float) -> tuple[int, float] | None:
        """(steps, seconds) of the first recorded loss that is at most `target`."""
        for steps, seconds, loss in zip(self.steps, self.seconds, self.losses, strict=True):
            if loss <= target:
                return steps, seconds
        return None


class Stopwatch:
    """Counts seconds while it runs; waits for the GPU when it is stopped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counted = 0.0
        self._started: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._counted, self._started = self.seconds, None

    @property
    def seconds(self) -> float:
        if self._started is None:
            return self._counted
        return self._counted + time.perf_counter() - self._started


def train(
    label: str,
    model_name: str,
    data: ImageData,
    make_optimizer: MakeOptimizer,
    budget: Budget,
    batch_size: int = 128,
    seed: int = 0,
) -> Result:
    """Train a fresh model. The same seed gives the same weights and batches.

    The learning rate decays linearly to zero over the budget. A run whose loss is not finite ends early, with
    NaN as its last loss.
    """
    torch.manual_seed(seed)
    device = data.train_images.device
    model = make_model(model_name, data.image_shape).to(device)
    optimizer = make_optimizer(model.parameters())
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    loss_images, loss_labels = data.train_images[:LOSS_SAMPLES], data.train_labels[:LOSS_SAMPLES]
    batches = _batches(data, batch_size, seed)
    result = Result(label)
    clock = Stopwatch(device)
    steps, progress = 0, 0.0

    def record() -> None:
        result.steps.append(steps)
        result.seconds.append(clock.seconds)
        result.losses.append(evaluate(model, loss_images, loss_labels)[0])

    record()
    with _progress_bar(label) as bar:
        while progress < 1.0:
            clock.start()
            next_record = len(result.losses) / RECORDS
            while progress < next_record:
                for group, rate in zip(optimizer.param_groups, learning_rates, strict=True):
                    group["lr"] = rate * (1.0 - progress)
                images, labels = next(batches)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                if not loss.isfinite():
                    progress = 1.0
                    break
                # AdaHessian differentiates the gradients.
                loss.backward(create_graph=isinstance(optimizer, torchium.AdaHessian))
                optimizer.step()
                steps += 1
                progress = budget.progress(steps, clock.seconds)
            clock.stop()
            record()
            bar.set_postfix(steps=steps, loss=f"{result.losses[-1]:.4f}", refresh=False)
            bar.update(progress - bar.n)
    result.accuracy = evaluate(model, data.test_images, data.test_labels)[1]
    return result


def _progress_bar(label: str) -> tqdm:
    layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    return tqdm(total=1.0, desc=label, bar_format=layout)


def _batches(data: ImageData, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless sequence of shuffled batches."""
    generator = torch.Generator().manual_seed(seed)
    device = data.train_images.device
    while True:
        order = torch.randperm(len(data.train_labels), generator=generator).to(device)
        for indices in order.split(batch_size)[: len(order) // batch_size]:
            yield data.train_images[indices], data.train_labels[indices]
