"""Small deterministic training problems, the same in every dtype.

Parameters and data are drawn in float32 and then cast, so that a float32 and a float64 run start
from the same numbers. All losses are smooth: rounding must not decide on a branch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

STEPS = 24
BATCH = 16


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randomised(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`module` in `dtype`, with parameters that are normal numbers over sqrt(fan in)."""
    rng = generator(0)
    with torch.no_grad():
        for p in module.parameters():
            fan_in = p[0].numel() if p.dim() > 1 else 4
            p.copy_(torch.randn(p.shape, generator=rng) / fan_in**0.5)
    return module.to(dtype)


class Classifier(nn.Module):
    """A network on random inputs of `shape`, a new batch at every step."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.network, self.shape, self.classes = network, shape, classes

    def loss(self, step: int) -> Tensor:
        rng = generator(100 + step)
        x = torch.randn((BATCH, *self.shape), generator=rng)
        y = torch.randint(self.classes, (BATCH,), generator=rng)
        dtype = next(self.parameters()).dtype
        return nn.functional.cross_entropy(self.network(x.to(dtype)), y)


class OddShapes(nn.Module):
    """Parameters p_i of awkward shapes; the loss is sum_i log cosh(p_i - x_i), x_i new each step.

    `is_used(i, step)` says which parameters have a gradient.
    """

    shapes = (
        (), (1,), (5,), (13,), (1, 7), (7, 1), (1, 1), (9, 11), (2, 3, 4), (4, 1, 3),
        (3, 2, 2, 2), (1, 2, 3, 3), (6, 1, 1, 1), (2, 3, 2, 2, 2), (1, 3, 1, 4, 1),
    )  # fmt: skip

    def __init__(self, is_used: Callable[[int, int], bool] = lambda i, step: True) -> None:
        super().__init__()
        self.values = nn.ParameterList([torch.empty(shape) for shape in self.shapes])
        self.is_used = is_used

    def loss(self, step: int) -> Tensor:
        rng = generator(200 + step)
        x = [torch.randn(p.shape, generator=rng).flatten() for p in self.values]
        used = [i for i in range(len(x)) if self.is_used(i, step)]
        p = torch.cat([self.values[i].flatten() for i in used])
        return (p - torch.cat([x[i] for i in used]).to(p.dtype)).cosh().log().sum()


def mlp() -> nn.Module:
    network = nn.Sequential(
        nn.Linear(10, 17), nn.Tanh(), nn.Linear(17, 8), nn.Tanh(), nn.Linear(8, 4)
    )
    return Classifier(network, (10,), 4)


def convnet() -> nn.Module:
    network = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.GroupNorm(1, 5), nn.Tanh(), nn.Conv2d(5, 4, 2, stride=2),
        nn.Tanh(), nn.Flatten(), nn.Linear(4 * 2 * 2, 3),
    )  # fmt: skip
    return Classifier(network, (2, 6, 6), 3)


def intermittent() -> nn.Module:
    """Some gradients are None in some steps; the last two parameters come in late."""
    late = {len(OddShapes.shapes) - 2: 7, len(OddShapes.shapes) - 1: 9}
    return OddShapes(lambda i, step: step >= late.get(i, 0) and (step + i) % (2 + i % 4) != 0)


PROBLEMS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convnet": convnet,
    "odd_shapes": OddShapes,
    "intermittent": intermittent,
}


def train(
    problem: str,
    dtype: torch.dtype,
    make_optimizer: Callable[[list[nn.Parameter]], object],
    *,
    maximize: bool = False,
    before_step: Callable[[object, int], None] = lambda optimizer, step: None,
    steps: int = STEPS,
) -> list[list[Tensor]]:
    """All parameters at the start and after every step."""
    module = randomised(PROBLEMS[problem](), dtype)
    parameters = list(module.parameters())
    optimizer = make_optimizer(parameters)
    history = [[p.detach().clone() for p in parameters]]
    for step in range(steps):
        for p in parameters:
            p.grad = None
        loss = module.loss(step)
        (-loss if maximize else loss).backward()
        before_step(optimizer, step)
        optimizer.step()
        history.append([p.detach().clone() for p in parameters])
    return history
