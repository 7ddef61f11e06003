"""Models, batches and references that the tests of K-FAC share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torchium
from captured_layers import Conv1D
from reference import ReferenceKFAC, capture, layers_of
from torch import Tensor, nn
from torch.nn import functional as F

BARE: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "kl_clip": None}
SPLITS = ["pi", "plain", "exact"]


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def mlp(*sizes: int, bias: bool = True, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for n_in, n_out in itertools.pairwise(sizes):
            layers += [nn.Linear(n_in, n_out, bias=bias), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).double()


def updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The update of each parameter in one step."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    return [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]


def assert_close_in_norm(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (actual - expected).norm() <= tolerance * expected.norm()


def assert_each_close_in_norm(
    actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float
) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close_in_norm(ours.detach().cpu(), theirs.detach().cpu(), tolerance)


class Repeated(nn.Module):
    """A layer called three times, once on two positions per sample, and a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        pairs = torch.stack([x, -0.5 * x], 1)
        return self.out(torch.tanh(self.inner(torch.tanh(self.inner(pairs)).sum(1))))


class Tied(nn.Module):
    """One weight in two layers with the same bias, another with two biases, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias
        self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 4)
        self.d.weight = self.c.weight
        self.out = nn.Linear(4, 3)
        self.out.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.c, self.b, self.d):
            x = torch.tanh(layer(x))
        return self.out(x)


class TiedHead(nn.Module):
    """An embedding, looked up twice, whose weight is that of a head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=2)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        words = (3 * x).long() % 7
        x = torch.tanh(self.mix(self.table(words))) + self.table(words[:, :1])
        return self.head(x).mean(1)


class Table(nn.Module):
    """An embedding with a padding word, looked up twice, and one with a word for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=2)
        self.kinds = nn.Embedding(3, 6)
        self.mix, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = (3 * x).long() % 7
        x = self.table(words).sum(1) + self.table(words[:, :1])[:, 0]
        return self.out(torch.tanh(self.mix(x) + self.kinds(words[:, 0] % 3)))


class Sequences(nn.Module):
    """Linear layers on [N, T1, T2, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x.unflatten(1, (2, 1, 2)))))
        return x.sum((1, 2))


class Transposed(nn.Module):
    """Linear layers with weights [in, out], on sequences and on vectors, one of them square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.square, self.out = Conv1D(5, 2), Conv1D(5, 5), Conv1D(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.square(torch.tanh(self.first(x.unflatten(1, (2, 2))))))
        return self.out(x.sum(1))


def convolutions() -> nn.Module:
    """Groups, dilation, stride, all kinds of padding, biases, and parameters of other layers."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 4, (2, 3), stride=(2, 1), dilation=(1, 2), padding=(1, 0), bias=False),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular", groups=4),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, padding="same"),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def signals() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 4, padding="same", groups=2),
        nn.Tanh(),
        nn.Conv1d(4, 3, 3, stride=2, padding=2, dilation=2, padding_mode="reflect"),
        nn.Tanh(),
        nn.Conv1d(3, 2, 1, bias=False),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, (1, 2, 3), padding=(0, 1, 1), stride=(1, 2, 1), groups=2),
        nn.Tanh(),
        nn.Conv3d(4, 3, 2, padding="same", padding_mode="replicate", bias=False),
        nn.Tanh(),
        nn.Conv3d(3, 2, (2, 1, 2), dilation=(2, 1, 1)),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def deconvolutions() -> nn.Module:
    """From a code to an image: groups, output padding, dilation, and biases, which fall back."""
    return nn.Sequential(
        nn.Linear(4, 12),
        nn.Unflatten(1, (4, 1, 3)),
        nn.ConvTranspose2d(4, 6, (2, 3), stride=2, groups=2, output_padding=(1, 0)),
        nn.Tanh(),
        nn.ConvTranspose2d(6, 2, 3, stride=(1, 2), padding=(1, 2), dilation=(1, 2), bias=False),
        nn.Tanh(),
        nn.Conv2d(2, 3, 3),
        nn.Flatten(2),
        Mean(),
    )


class Mean(nn.Module):
    """Over the pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(2)


def deconvolved_signals() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose1d(2, 3, 4, stride=3, padding=2, output_padding=2),
        nn.Tanh(),
        nn.ConvTranspose1d(3, 2, 1, bias=False),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def deconvolved_volumes() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose3d(2, 4, (1, 2, 3), padding=(0, 1, 1), stride=(1, 2, 1), groups=2),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


class Deconvolved(nn.Module):
    """A transposed convolution that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.ConvTranspose2d(2, 2, 2), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x.view(-1, 2, 1, 2)))
        return self.out(torch.tanh(self.up(x)).flatten(1))


# name -> the model, the shape of a sample
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(4, 6, 5, 3), (4,)),
    "repeated": (Repeated, (4,)),
    "tied": (Tied, (4,)),
    "tied_head": (TiedHead, (4,)),
    "table": (Table, (4,)),
    "sequences": (Sequences, (4,)),
    "convolutions": (convolutions, (2, 6, 7)),
    "signals": (signals, (2, 7)),
    "volumes": (volumes, (2, 4, 5, 3)),
    "transposed": (Transposed, (4,)),
    "deconvolutions": (deconvolutions, (4,)),
    "deconvolved_signals": (deconvolved_signals, (2, 3)),
    "deconvolved_volumes": (deconvolved_volumes, (2, 2, 3, 2)),
    "deconvolved": (Deconvolved, (4,)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 0.05},
    "schedules": {"lr": 0.1, "TCov": 2, "TInv": 3, "stat_decay": 0.6, "kl_clip": 0.01},
    "every_step": {"lr": 0.1, "TCov": 1, "TInv": 1, "weight_decay": 0.01, "damping": 0.1},
    "diagonals": {"lr": 0.1, "TCov": 1, "TInv": 2, "max_factor_size": 5, "damping": 0.01},
    "reduce": {"lr": 0.1, "TCov": 1, "TInv": 2, "weight_sharing": "reduce"},
    "reduced_diagonals": {"lr": 0.1, "TCov": 2, "weight_sharing": "reduce", "max_factor_size": 5},
}


def make_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    make, shape = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make().double()
        model(torch.zeros(1, *shape, dtype=torch.float64))  # for LazyLinear
    return model, shape


def batch_of(shape: tuple[int, ...], step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    return random(size, *shape, seed=100 + step), (torch.arange(size) + step) % 3


def train_reference(
    model: nn.Module,
    shape: tuple[int, ...],
    steps: int,
    *,
    kind: Callable[..., ReferenceKFAC] = ReferenceKFAC,
    fisher: str = "empirical",
    size: int = 4,
    **options: Any,
) -> None:
    """Capture sample by sample; gradients of the mean loss by one pass."""
    of_all_groups = {"kl_clip", "damping_split", "alpha1", "structures", "structures_of_layers"}
    shared = {k: options.pop(k) for k in of_all_groups & options.keys()}
    params = [p for p in model.parameters() if p.requires_grad]
    layers = layers_of(model)
    reference = kind([{"params": params, **options}], layers, **shared)
    for step in range(steps):
        x, y = batch_of(shape, step, size)
        samples = [(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
        captured = capture(model, layers, samples, F.cross_entropy, fisher)
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), params)
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        reference.step(captured)


def factors_of(optimizer: torchium.KFAC) -> list[Tensor]:
    states = [s for s in optimizer.state.values() if "A" in s]
    return [state[key] for state in states for key in ("A", "G")]


def random_network(seed: int) -> tuple[nn.Sequential, Tensor]:
    """Linear and Conv2d layers of random sizes, with a random batch."""
    rng = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    layers: list[nn.Module] = []
    channels, size, samples = integer(1, 3), integer(5, 8), integer(3, 7)
    x = random(samples, channels, size, size + 1, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(integer(0, 2)):
            width, bias = integer(2, 4), bool(integer(0, 1))
            layers += [
                nn.Conv2d(
                    channels,
                    width,
                    integer(1, 3),
                    stride=integer(1, 2),
                    padding=integer(0, 1),
                    bias=bias,
                ),
                nn.Tanh(),
            ]
            channels = width
        layers.append(nn.Flatten())
        for _ in range(integer(1, 2)):
            layers += [nn.LazyLinear(integer(2, 6), bias=bool(integer(0, 1))), nn.ReLU()]
        model = nn.Sequential(*layers, nn.LazyLinear(3)).double()
        model(x)
    return model, x


def curvlinops_directions(
    model: nn.Module,
    loss_fn: nn.Module,
    x: Tensor,
    y: Tensor,
    fisher_type: str,
    sharing: str,
    damping: dict[str, Any],
    scale: float = 1.0,
) -> list[Tensor]:
    """Those of curvlinops for the gradients of `model`, times `scale`."""
    curvlinops = pytest.importorskip("curvlinops")
    params = list(model.parameters())
    kfac = curvlinops.KFACLinearOperator(
        model,
        loss_fn,
        params,
        [(x, y)],
        fisher_type=fisher_type,
        kfac_approx=sharing,
        separate_weight_and_bias=False,
    )
    inverse = curvlinops.KFACInverseLinearOperator(kfac, **damping)
    return inverse @ [scale * p.grad for p in params]
