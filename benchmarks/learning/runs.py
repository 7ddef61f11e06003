"""Training runs and their records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from shared.device_clock import Clock, synchronize
from torch import Tensor, nn
from torch.optim import Optimizer

from learning.optimizers import OPTIMIZERS
from learning.task import Settings, Task


@dataclass
class Run:
    """Losses are recorded at intervals; the seconds are training time only.

    The goal of the others is the last validation loss of the baseline, or its lowest training loss.
    """

    optimizer: str
    lr: float
    seed: int
    length: int  # requested steps
    conditions: str  # that affect its seconds
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    train_losses: list[float] = field(default_factory=list)  # mean since the last record
    validation_losses: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)  # per step
    accuracies: list[float] = field(default_factory=list)  # on held-out data, if it has classes
    task: str = "transformer"
    goal: str = "validation"  # the loss that counts; or "training"

    @property
    def key(self) -> tuple[object, ...]:
        return self.optimizer, self.lr, self.seed, self.task, self.length, self.conditions

    @property
    def losses(self) -> list[float]:
        return self.train_losses if self.goal == "training" else self.validation_losses

    @property
    def reached(self) -> tuple[float, int, float]:
        """The loss that the run reaches, its steps and seconds; infinite if it diverged."""
        losses = self.losses
        i = len(losses) - 1
        if not math.isfinite(losses[i]):
            return math.inf, self.steps[i], self.seconds[i]
        if self.goal == "training":
            i = min(range(len(losses)), key=losses.__getitem__)
        return losses[i], self.steps[i], self.seconds[i]

    def first_below(self, loss: float) -> tuple[float, float] | None:
        """(steps, seconds) until the loss is below `loss`, interpolated between records."""
        losses = self.losses
        for i, value in enumerate(losses):
            if value <= loss:
                share = (losses[i - 1] - loss) / (losses[i - 1] - value) if i else 1.0
                return tuple(  # type: ignore[return-value]
                    (axis[i - 1] if i else 0) * (1 - share) + axis[i] * share
                    for axis in (self.steps, self.seconds)
                )
        return None


class Stopwatch:
    """Times the optimizer's steps without a wait: by events on the stream, or by the CPU's clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.mark = clock, clock.mark
        self._marks: list[tuple[Any, Any]] = []

    def keep(self, start: Any) -> None:
        self._marks.append((start, self.mark()))

    def milliseconds(self) -> list[float]:
        """Of all recorded steps; the device must have finished them."""
        return [self._clock.between(*marks) for marks in self._marks]


def gradient_function(
    task: Task, model: nn.Module, settings: Settings, example: Tensor
) -> Callable[[Tensor], Tensor]:
    """A function of a batch's indices that computes the gradients and returns the loss."""

    def compute(places: Tensor) -> Tensor:
        for p in model.parameters():
            p.grad = None
        loss = task.loss(model, places)
        loss.backward()
        return loss.detach()

    if not settings.graph:
        return compute
    places = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            compute(places)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = compute(places)

    def replay(batch: Tensor) -> Tensor:
        places.copy_(batch)
        graph.replay()
        return loss

    return replay


def took_step(optimizer: Optimizer) -> bool:
    """Whether it did not give up on gradients or roots that are not finite."""
    try:
        optimizer.step()
    except RuntimeError as error:
        if "in a row" not in str(error):
            raise
        return False
    return True


def train(task: Task, settings: Settings, name: str, lr: float, seed: int) -> Run:
    """Train a fresh model; the same seed gives every optimizer the same weights and batches.

    The host waits for the device only at records. A run with a non-finite loss stops there, and one whose
    optimizer gives up stops with NaN.
    """
    torch.manual_seed(seed)
    device = task.device
    model = task.model().to(device)
    optimizers = OPTIMIZERS[name](task, model, lr)
    groups = [(group, group["lr"]) for o in optimizers for group in o.param_groups]
    batches = task.draw(settings.steps, settings.batch, seed)
    compute = gradient_function(task, model, settings, batches[0])
    conditions = settings.conditions(device)
    run = Run(name, lr, seed, settings.steps, conditions, task=task.name, goal=task.goal)
    watch = Stopwatch(Clock(device.type))
    total = torch.zeros((), device=device)
    seconds = 0.0
    synchronize(device)
    begin = time.perf_counter()
    for step in range(settings.steps):
        total += compute(batches[step])
        for group, peak in groups:
            group["lr"] = peak * settings.learning_rate(step)
        start = watch.mark()
        has_diverged = not all(map(took_step, optimizers))
        watch.keep(start)
        is_last = step + 1 == settings.steps or has_diverged
        if (step + 1) % settings.evaluate_every == 0 or is_last:
            synchronize(device)
            seconds += time.perf_counter() - begin
            count = step + 1 - (run.steps[-1] if run.steps else 0)
            run.steps.append(step + 1)
            run.seconds.append(seconds)
            run.train_losses.append(math.nan if has_diverged else float(total) / count)
            validation_loss, accuracy = task.evaluate(model)
            validation_loss = math.nan if has_diverged else validation_loss
            run.validation_losses.append(validation_loss)
            if accuracy is not None:
                run.accuracies.append(accuracy)
            total.zero_()
            if not math.isfinite(run.validation_losses[-1]):
                break
            synchronize(device)
            begin = time.perf_counter()
    run.optimizer_ms = [round(ms, 4) for ms in watch.milliseconds()]
    return run
