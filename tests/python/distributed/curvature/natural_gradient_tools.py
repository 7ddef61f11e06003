"""Models, batches and references for processes that share the steps of NaturalGradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import captured_layers
import torch
import torch.distributed as dist
from captured_layers import loss_fn
from group_tools import assert_same_on_all_ranks, world
from ranks import device
from reference import ReferenceNaturalGradient
from reference.per_sample import per_sample_gradients
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
SOLVERS: dict[str, dict[str, Any]] = {
    "gram": {"solver": "gram"},
    "gram_by_layers": {"solver": "gram", "max_workspace_bytes": 1},
    "explicit": {"solver": "explicit"},
    "explicit_by_samples": {"solver": "explicit", "max_workspace_bytes": 1},
    "cg": {"solver": "cg", "eps": 1e-13},
    "nystrom": {"solver": "cg", "eps": 1e-13, "nystrom_rank": 3},
}
_alone: list[Any] = []


def alone() -> Any:
    """A group of this process alone, in which the optimizer works as without one."""
    if not _alone:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _alone.append(groups[dist.get_rank()])
    return _alone[0]


def sizes_of(ranks: int, equal: bool = False) -> list[int]:
    """Samples of each rank."""
    return [3] * ranks if equal else [3, 2, 4, 1][:ranks]


def own() -> int:
    return dist.get_rank()


def natural_gradient(params: Any, group: Any = None, **options: Any) -> Any:
    import torchium

    given = {"lr": 0.5, "damping": 1e-2, "process_group": world() if group is None else group}
    return torchium.NaturalGradient(params, **{**given, **options})


def model_and_batch(name: str, samples: int = 5, **options: Any) -> tuple[nn.Module, Batch]:
    """On the device of this rank."""
    return captured_layers.model_and_batch(name, samples, device=device(), **options)


def batches_of(name: str, sizes: Sequence[int], seed: int) -> list[Batch]:
    """The samples of each rank."""
    x, y = model_and_batch(name, sum(sizes), seed=seed)[1]
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in trained(model)])


def average_gradients(model: nn.Module) -> None:
    """What DistributedDataParallel does."""
    for p in trained(model):
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def step(
    optimizer: Any, model: nn.Module, batch: Batch, change: Callable[[Any], None] | None = None
) -> None:
    """One step of all ranks with these samples of this one; `change` may modify the gradients."""
    optimizer.zero_grad()
    loss_fn(model(batch[0]), batch[1]).backward()
    average_gradients(model)
    if change is not None:
        change(trained(model))
    optimizer.step()


class Dense:
    """The dense solve in float64 with the gradients of the samples of all ranks; by the CPU of rank 0."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = copy.deepcopy(model).cpu()
        self.names = [n for n, p in self.model.named_parameters() if p.requires_grad]
        given = {"lr": 0.5, "damping": 1e-2}
        self.optimizer = ReferenceNaturalGradient(trained(self.model), **{**given, **options})

    def step(self, batches: Sequence[Batch], change: Callable[[Any], None] | None = None) -> None:
        if own() != 0:
            return
        rows = [per_sample_gradients(self.model, loss_fn, x.cpu(), y.cpu()) for x, y in batches]
        for name, p in zip(self.names, self.optimizer.params, strict=True):
            p.grad = torch.stack([r[name].mean(0) for r in rows]).mean(0)
        if change is not None:
            change(self.optimizer.params)
        self.optimizer.step([torch.cat([r[name] for r in rows]) for name in self.names])

    def assert_moved_alike(self, model: nn.Module, start: Tensor, tolerance: float) -> None:
        if own() == 0:
            assert_near((flat(model) - start).cpu(), flat(self.model) - start.cpu(), tolerance)
        assert_same_on_all_ranks(trained(model))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.norm() > 0
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error <= tolerance, error


def assert_moved_alike(
    model: nn.Module, expected: nn.Module, start: Tensor, tolerance: float
) -> None:
    assert_near(flat(model) - start, flat(expected) - start, tolerance)
    assert_same_on_all_ranks(trained(model))
