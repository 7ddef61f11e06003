"""Models, data and training for processes that share the steps of K-FAC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from group_tools import in_one_process, whole_state, world
from ranks import device
from torch import Tensor, nn

FRACTIONS = (1.0, 0.5, 0.01)  # of all workers, some, and one


class Network(nn.Module):
    """Layers of every kind that has factors of its own, and a parameter without any."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, groups=2)
        self.transposed = nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.words = nn.Embedding(7, 4)
        self.hidden = nn.Linear(36, 4)
        self.out = nn.Linear(8, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def features(self, images: Tensor) -> Tensor:
        return self.norm(self.transposed(self.convolution(images).tanh())).tanh().flatten(1)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        hidden = self.hidden(self.features(images)).tanh()
        joined = torch.cat([hidden, self.words(words).mean(1)], 1)
        return self.out(joined) * self.scale


class Tied(nn.Module):
    """A head whose weight is the embedding table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.words.weight

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        return self.head(self.hidden(self.words(words)).tanh()).mean(1)[:, :3]


class Small(nn.Module):
    """Every factor has different eigenvalues, so that its eigenvectors are known up to their signs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2)
        self.out = nn.Linear(3, 3)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        return self.out(self.convolution(images).tanh().mean((2, 3)))


def network(kind: type[nn.Module] = Network, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(device(), dtype)


class Batch:
    """The samples of a step, of which each rank has a part."""

    def __init__(self, step: int, samples: int = 12, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(step)
        self.images = torch.randn(samples, 2, 5, 5, generator=generator).to(device(), dtype)
        self.words = torch.randint(7, (samples, 3), generator=generator).to(device())
        self.targets = torch.randint(3, (samples,), generator=generator).to(device())

    def __len__(self) -> int:
        return len(self.targets)

    def of(self, own: slice) -> Batch:
        part = Batch.__new__(Batch)
        part.images, part.words = self.images[own], self.words[own]
        part.targets = self.targets[own]
        return part

    def loss(self, model: nn.Module, reduction: str = "mean") -> tuple[Tensor, Tensor]:
        outputs = model(self.images, self.words)
        return outputs, nn.functional.cross_entropy(outputs, self.targets, reduction=reduction)


def own_part(samples: int, ranks: int, *, equal: bool = True) -> slice:
    """The samples of this rank; unequal parts grow with the rank."""
    shares = [1 if equal else rank + 1 for rank in range(ranks)]
    ends = [samples * sum(shares[:rank]) // sum(shares) for rank in range(ranks + 1)]
    rank = dist.get_rank()
    return slice(ends[rank], ends[rank + 1])


def sum_gradients(model: nn.Module, weight: float) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(weight)
            dist.all_reduce(p.grad)


def backward(model: nn.Module, step: int, prepare: Callable[[Batch], None] | None = None) -> None:
    """Gradients of the samples of all ranks; prepare(): for the samples of this one."""
    batch = Batch(step)
    own = batch.of(own_part(len(batch), dist.get_world_size()))
    if prepare is not None:
        prepare(own)
    own.loss(model)[1].backward()
    sum_gradients(model, len(own) / len(batch))


def kfac(model: Any, group: Any = None, *, name: str = "KFAC", **options: Any) -> Any:
    import torchium

    given: dict[str, Any] = {"lr": 0.05, "TCov": 2, "TInv": 3} if name == "KFAC" else {}
    if options.get("solver") == "inverse_free":
        del given["TInv"]
    return getattr(torchium, name)(model, process_group=group, **{**given, **options})


def step_alone(model: nn.Module, optimizer: Any, batch: Batch, *, reduction: str = "mean") -> None:
    """On the joint batch."""
    with in_one_process():
        optimizer.zero_grad()
        outputs, loss = batch.loss(model, reduction)
        if optimizer.param_groups[0]["fisher"] == "ggn":
            optimizer.update_curvature(outputs, "cross_entropy")
        loss.backward()
        optimizer.step()


def step_shared(
    model: nn.Module,
    optimizer: Any,
    batch: Batch,
    *,
    equal: bool = True,
    reduction: str = "mean",
    loss_scale: float = 1.0,
) -> None:
    """On the samples of this rank, with the gradients of the joint batch."""
    own = batch.of(own_part(len(batch), dist.get_world_size(), equal=equal))
    optimizer.zero_grad()
    outputs, loss = own.loss(model, reduction)
    if optimizer.param_groups[0]["fisher"] == "ggn":
        optimizer.update_curvature(outputs, "cross_entropy")
    (loss * loss_scale).backward()
    sum_gradients(model, len(own) / len(batch) if reduction == "mean" else 1.0)
    optimizer.step()


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Parameters and the whole state."""
    result = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = list(result)
    for i, state in whole_state(optimizer)["state"].items():
        result.update({f"{key} of {names[i]}": value for key, value in state.items()})
    return result


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float
) -> None:
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for key, value in expected.items():
        if "eigenvectors" in key:  # signs are free
            continue
        given = {"rtol": 1e-8, "atol": 1e-10, **tolerance}
        torch.testing.assert_close(
            actual[key], value, msg=lambda text, k=key: f"{k}: {text}", **given
        )


def trained(
    group: Any = None,
    steps: range = range(6),
    *,
    kind: type[nn.Module] = Network,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """A model and its optimizer after steps with the group, or alone on the joint batches."""
    model = network(kind, dtype)
    optimizer = kfac(model, group, **options)
    for step in steps:
        (step_alone if group is None else step_shared)(model, optimizer, Batch(step, dtype=dtype))
    return model, optimizer


def shared(**options: Any) -> tuple[nn.Module, Any]:
    return trained(world(), **options)
