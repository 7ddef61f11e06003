"""What a member of the zoo is: a model, data that it can learn, and a way to train it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Any, ...]
Loss = Callable[[nn.Module, Batch], Tensor]
MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True)
class Size:
    """How large the models are: small ones for every test run, or whole."""

    whole: bool = False

    def of(self, small: int, whole: int) -> int:
        return whole if self.whole else small


@dataclass
class Task:
    """A model, the fixed batches that training goes through again and again, and their loss.

    Args:
        fall: the share of the first loss, a mean over all batches, that training has to take away.
        step: one step of training, where a plain one will not do: ``step(task, optimizers, index)``.
        trained: the parts of the model that have an optimizer of their own; None: the model.
        score: what has to fall, where that is not the mean of ``loss`` over the batches.
        options: of the optimizers that have them, where the usual ones do not suit the task.
    """

    model: nn.Module
    batches: Sequence[Batch]
    loss: Loss
    fall: float = 0.1
    step: Callable[[Task, list[Optimizer], int], None] | None = None
    trained: Sequence[nn.Module] | None = None
    score: Callable[[Task], float] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def to(self, device: torch.device) -> Task:
        self.model.to(device)
        self.batches = [moved(batch, device) for batch in self.batches]
        return self

    def batch(self, index: int) -> Batch:
        return self.batches[index % len(self.batches)]

    def measured(self) -> float:
        """What has to fall. With gradients enabled: the loss may need derivatives."""
        if self.score is not None:
            return self.score(self)
        losses = [self.loss(self.model, batch).item() for batch in self.batches]
        return math.fsum(losses) / len(losses)

    def train(self, make: MakeOptimizer, steps: int) -> tuple[list[Optimizer], float]:
        """The optimizers after training, and the mean of what was measured towards its end."""
        optimizers = [make(part) for part in self.trained or [self.model]]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.update({key: self.options[key] for key in self.options if key in group})
        step = self.step or plain_step
        measured = []
        for index in range(steps):
            step(self, optimizers, index)
            if index in (steps - 9, steps - 5, steps - 1):  # the last loss alone may be a spike
                measured.append(self.measured())
        return optimizers, math.fsum(measured) / len(measured)


def plain_step(task: Task, optimizers: list[Optimizer], index: int) -> None:
    (optimizer,) = optimizers
    optimizer.zero_grad()
    task.loss(task.model, task.batch(index)).backward()
    optimizer.step()


def moved(value: Any, device: torch.device) -> Any:
    """A batch on another device, through tuples and dicts."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    return value


def of_outputs(criterion: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """The loss of a model that maps the first tensors of a batch to outputs for the last one."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return criterion(model(*batch[:-1]), batch[-1])

    return loss


cross_entropy = of_outputs(nn.functional.cross_entropy)
squared_error = of_outputs(nn.functional.mse_loss)
