"""An ordinary small network, trained in the ways that training loops have."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from awkward_data import mlp
from learnable_data import CLASSES, clusters
from task import Size, Task, cross_entropy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.checkpoint import checkpoint

Step = Callable[[Task, list[Optimizer], int], None]


def clipped(task: Task, optimizers: list[Optimizer], index: int) -> None:
    (optimizer,) = optimizers
    optimizer.zero_grad()
    task.loss(task.model, task.batch(index)).backward()
    nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
    optimizer.step()


def accumulated(task: Task, optimizers: list[Optimizer], index: int) -> None:
    """Four backward passes a step."""
    (optimizer,) = optimizers
    inputs, targets = task.batch(index)
    for part in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        (task.loss(task.model, part) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_closure(task: Task, optimizers: list[Optimizer], index: int) -> None:
    (optimizer,) = optimizers

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.loss(task.model, task.batch(index))
        loss.backward()
        return loss

    optimizer.step(closure)


def autocast(task: Task, optimizers: list[Optimizer], index: int) -> None:
    (optimizer,) = optimizers
    optimizer.zero_grad()
    with torch.autocast(task.device.type, torch.bfloat16):
        loss = task.loss(task.model, task.batch(index))
    loss.backward()
    optimizer.step()


def _scaled() -> Step:
    """float16 with a loss scale that is too high at first, so that steps are skipped."""
    scalers: list[torch.amp.GradScaler] = []

    def step(task: Task, optimizers: list[Optimizer], index: int) -> None:
        (optimizer,) = optimizers
        if index == 0:
            scalers.append(torch.amp.GradScaler(task.device.type, init_scale=2.0**18))
            if hasattr(optimizer, "grad_scaler"):
                optimizer.grad_scaler = scalers[0]
        optimizer.zero_grad()
        with torch.autocast(task.device.type, torch.float16):
            loss = task.loss(task.model, task.batch(index))
        scalers[0].scale(loss).backward()
        scalers[0].unscale_(optimizer)
        nn.utils.clip_grad_norm_(task.model.parameters(), 10.0)
        scalers[0].step(optimizer)
        scalers[0].update()

    return step


def _scheduled() -> Step:
    """A warm-up, then half a cosine."""
    schedulers: list[Any] = []

    def step(task: Task, optimizers: list[Optimizer], index: int) -> None:
        (optimizer,) = optimizers
        if index == 0:
            warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=8)
            cosine = CosineAnnealingLR(optimizer, T_max=40)
            schedulers.append(SequentialLR(optimizer, [warm_up, cosine], milestones=[8]))
        clipped(task, optimizers, index)
        schedulers[0].step()

    return step


def resumed(task: Task, optimizers: list[Optimizer], index: int) -> None:
    """Every tenth step begins with a checkpoint that was saved and loaded."""
    if index % 10 == 9:
        file = io.BytesIO()
        torch.save([task.model.state_dict(), optimizers[0].state_dict()], file)
        file.seek(0)
        model, optimizer = torch.load(file, weights_only=True)
        task.model.load_state_dict(model)
        optimizers[0].load_state_dict(optimizer)
    clipped(task, optimizers, index)


class Checkpointed(nn.Module):
    """Computes the activations of its blocks a second time in the backward pass."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)
        )
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def checkpointed(size: Size) -> Task:
    features = size.of(12, 200)
    return Task(Checkpointed(features, size.of(16, 128)), clusters((features,), 32), cross_entropy)


def bfloat16(size: Size) -> Task:
    """Parameters of 16 bits."""
    task = mlp(size)
    task.model.to(torch.bfloat16)
    task.batches = [(inputs.to(torch.bfloat16), targets) for inputs, targets in task.batches]
    return task


def _trained_by(make_step: Callable[[], Step]) -> Callable[[Size], Task]:
    return lambda size: replace(mlp(size), step=make_step())


KINDS: dict[str, Callable[[Size], Task]] = {
    "clipped": _trained_by(lambda: clipped),
    "accumulated": _trained_by(lambda: accumulated),
    "with_closure": _trained_by(lambda: with_closure),
    "autocast": _trained_by(lambda: autocast),
    "scaled": _trained_by(_scaled),
    "scheduled": _trained_by(_scheduled),
    "resumed": _trained_by(lambda: resumed),
    "checkpointed": checkpointed,
    "bfloat16": bfloat16,
}
