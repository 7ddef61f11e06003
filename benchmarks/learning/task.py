"""The interface of a task for the convergence benchmark."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Settings:
    batch: int
    steps: int = 1000
    warm_up: int = 50
    evaluate_every: int = 50
    graph: bool = False  # forward and backward pass as one CUDA graph

    def conditions(self, device: torch.device) -> str:
        """The conditions that affect seconds; only runs with equal conditions are compared."""
        is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else "CPU"
        precision = torch.get_float32_matmul_precision()
        return f"{name}, {'graph' if self.graph else 'eager'}, float32 products: {precision}"

    def learning_rate(self, step: int) -> float:
        """The fraction of the peak at `step`, from 0: linear warm-up, then cosine decay to zero."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        return 0.5 + 0.5 * math.cos(math.pi * (step - self.warm_up) / (self.steps - self.warm_up))


@dataclass(frozen=True)
class Targets:
    """Upper limits for an optimizer."""

    optimizer: str
    steps: float  # until the baseline's loss, relative to the baseline's
    seconds: float
    optimizer_ms: float | None = None  # per step


class Task(ABC):
    """A model and its data, on `device`.

    A batch is drawn as the indices of its examples; all batches of a run are drawn before it starts.
    """

    name: str  # of --task, and in stored runs
    title: str
    loss_unit: str
    settings: Settings
    grids: Mapping[str, Sequence[float]]  # the default learning rates of each of its optimizers
    baseline = "AdamW"
    goal = "validation"  # the loss that counts; or "training"
    targets: Sequence[Targets] = ()
    device: torch.device

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model on the CPU; its weights depend on torch's seed."""

    @abstractmethod
    def hidden(self, model: nn.Module) -> list[nn.Parameter]:
        """The weights between the first and the last layer."""

    @abstractmethod
    def draw(self, steps: int, batch: int, seed: int) -> Tensor:
        """The example indices of all batches of a run: int64 [steps, batch] on the device."""

    @abstractmethod
    def loss(self, model: nn.Module, places: Tensor) -> Tensor:
        """The mean loss of one batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        """Mean loss on all held-out data, and the accuracy for a classification."""

    @abstractmethod
    def describe(self, settings: Settings) -> str:
        """Model, batches, precision, data and options of optimizers, in a few sentences."""
