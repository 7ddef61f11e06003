"""Models that are more than layers one after the other: graphs, equations, games, adapters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from awkward_data import perceptron
from learnable_data import CLASSES, clusters
from task import Batch, Size, Task, cross_entropy, squared_error
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Optimizer


def autoencoder(size: Size) -> Task:
    features, hidden = size.of(12, 200), size.of(8, 64)
    model = nn.Sequential(
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 3),
        nn.Linear(3, hidden),
        nn.ReLU(),
        nn.Linear(hidden, features),
    )
    batches = [(inputs, inputs) for inputs, _ in clusters((features,), 32)]
    return Task(model, batches, squared_error, fall=0.03)


class GraphNetwork(nn.Module):
    """Two rounds in which each node adds up what its neighbours know."""

    def __init__(self, adjacency: Tensor, features: int, width: int) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.first = nn.Linear(features, width)
        self.second = nn.Linear(width, CLASSES)

    def forward(self, nodes: Tensor) -> Tensor:
        return self.adjacency @ self.second((self.adjacency @ self.first(nodes)).relu())


def _graph(sparse: bool) -> Callable[[Size], Task]:
    """Classes of nodes, most of whose neighbours are of their class."""

    def build(size: Size) -> Task:
        nodes, features = size.of(40, 1000), size.of(12, 500)
        ((inputs, targets),) = clusters((features,), nodes, batches=1)
        inputs = torch.where(torch.rand_like(inputs) < 0.7, 0.0, inputs)
        similar = targets[:, None] == targets
        edges = (torch.rand(nodes, nodes) < torch.where(similar, 0.2, 0.01)).float()
        edges = ((edges + edges.T + torch.eye(nodes)) > 0).float()
        degrees = edges.sum(1).rsqrt()
        adjacency = degrees[:, None] * edges * degrees
        model = GraphNetwork(
            adjacency.to_sparse_coo() if sparse else adjacency, features, size.of(8, 64)
        )
        return Task(model, [(inputs, targets)], cross_entropy)

    return build


def poisson_loss(model: nn.Module, batch: Batch) -> Tensor:
    """-u'' / pi^2 = sin(pi x) with u(-1) = u(1) = 0."""
    (points,) = batch
    points = points.clone().requires_grad_()
    values = model(points)
    (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), points, create_graph=True)
    residual = curvature / math.pi**2 + torch.sin(math.pi * points)
    ends = model(points.new_tensor([[-1.0], [1.0]]))
    return residual.square().mean() + ends.square().mean()


def physics(size: Size) -> Task:
    width = size.of(8, 64)
    model = nn.Sequential(
        nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    batches = [(2 * torch.rand(size.of(16, 256), 1) - 1,) for _ in range(4)]
    return Task(model, batches, poisson_loss, fall=0.02)


class Adversaries(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = perceptron(2, width, classes=2)
        self.discriminator = perceptron(2, width, classes=1)

    def fake(self, samples: int, device: torch.device) -> Tensor:
        noise = torch.randn(samples, 2, device=device)
        return noise + self.generator(noise)


def adversarial_step(task: Task, optimizers: list[Optimizer], index: int) -> None:
    """The discriminator's step, then the generator's, each with its own optimizer."""
    generator, discriminator = optimizers
    model: Adversaries = task.model
    (real,) = task.batch(index)
    fake = model.fake(len(real), real.device)
    discriminator.zero_grad()
    real_loss = F.softplus(-model.discriminator(real)).mean()
    (real_loss + F.softplus(model.discriminator(fake.detach())).mean()).backward()
    discriminator.step()
    if index < 10:  # at first it would follow a discriminator that knows nothing
        return
    generator.zero_grad()
    F.softplus(-model.discriminator(fake)).mean().backward()
    generator.step()


def distance(task: Task) -> float:
    """From the mean of the fakes to that of the real points."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        fake = task.model.fake(256, task.device).mean(0)
    real = torch.cat([points for (points,) in task.batches]).mean(0)
    return (fake - real).norm().item()


def adversaries(size: Size) -> Task:
    """Two optimizers, one of which takes gradients through the other's part."""
    model = Adversaries(size.of(16, 32))
    batches = [(torch.tensor([2.0, -1.0]) + torch.randn(64, 2),) for _ in range(4)]
    return Task(
        model,
        batches,
        loss=lambda model, batch: model.generator(batch[0]),
        step=adversarial_step,
        trained=[model.generator, model.discriminator],
        score=distance,
        fall=0.02,
        options={"momentum": 0.0},  # with it the two circle around each other
    )


def weight_norm(size: Size) -> Task:
    features = size.of(12, 200)
    model = perceptron(features, size.of(16, 128))
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    return Task(model, clusters((features,), 32), cross_entropy)


class LowRank(nn.Module):
    """Adds a product of two thin matrices to a frozen weight."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def lora(size: Size) -> Task:
    features = size.of(12, 200)
    model = perceptron(features, size.of(16, 128))
    model[0], model[2] = LowRank(model[0], 2), LowRank(model[2], 2)
    return Task(model, clusters((features,), 32), cross_entropy, fall=0.05)


class LowRankWeight(nn.Module):
    """The same as a parametrization: both factors are bare parameters."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(rows, rank))
        self.right = nn.Parameter(torch.randn(rank, columns) / columns**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


def lora_parametrized(size: Size) -> Task:
    features = size.of(12, 200)
    model = perceptron(features, size.of(16, 128)).requires_grad_(False)
    for layer in (model[0], model[2]):
        parametrize.register_parametrization(layer, "weight", LowRankWeight(*layer.weight.shape, 2))
    return Task(model, clusters((features,), 32), cross_entropy, fall=0.03)


class Experts(nn.Module):
    """Each sample goes to one expert; an expert without samples has no gradient in that step."""

    def __init__(self, features: int, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(features, experts)
        self.experts = nn.ModuleList(perceptron(features, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(1).max(1)
        outputs = x.new_zeros(len(x), CLASSES)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            if len(rows):
                outputs = outputs.index_add(0, rows, weights[rows, None] * expert(x[rows]))
        return outputs


def experts(size: Size) -> Task:
    features = size.of(8, 100)
    model = Experts(features, size.of(8, 64), size.of(4, 8))
    return Task(model, clusters((features,), size.of(8, 64)), cross_entropy)


KINDS: dict[str, Callable[[Size], Task]] = {
    "autoencoder": autoencoder,
    "dense_graph": _graph(sparse=False),
    "sparse_graph": _graph(sparse=True),
    "physics": physics,
    "adversaries": adversaries,
    "weight_norm": weight_norm,
    "lora": lora,
    "lora_parametrized": lora_parametrized,
    "experts": experts,
}
