"""torchium.KFAC through its public interface, against dense solves, the float64 reference and curvlinops.

Options that make one step the direction itself: lr 1, no momentum, no KL clip.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torchium
from captured_layers import Conv1D
from combinations import in_turn
from optimizer_cases import ignore_fallback
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


# Hand-built solves


@pytest.mark.parametrize("damping", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("bias", [True, False])
def test_one_sample_is_the_dense_damped_empirical_fisher(damping, bias, device):
    """Exact damping, no weight sharing: each block of the Fisher matrix is j j^T, j its gradient."""
    model = mlp(5, 4, 3, bias=bias).to(device)
    optimizer = torchium.KFAC(model, damping=damping, eps=1e-14, damping_split="exact", **BARE)
    loss = F.cross_entropy(model(random(1, 5).to(device)), torch.tensor([2], device=device))
    loss.backward()
    js = [p.grad.clone() for p in model.parameters()]
    for i, p in enumerate(model.parameters()):  # any V: .grad is preconditioned
        p.grad += random(*p.shape, seed=i).to(device)
    V = [p.grad.clone() for p in model.parameters()]
    step = updates(model, optimizer)
    per_layer = 2 if bias else 1
    for first in range(0, len(js), per_layer):
        of_layer = slice(first, first + per_layer)
        j, v, d = (torch.cat([t.flatten() for t in x[of_layer]]) for x in (js, V, step))
        fisher = torch.outer(j, j) + damping * torch.eye(len(j), dtype=j.dtype, device=device)
        assert_close_in_norm(d, torch.linalg.solve(fisher, v), 1e-8)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["sequence", "convolution"])
def test_reduce_is_exact_for_a_mean_over_the_positions(kind, bias, device):
    """One sample, exact damping: the block of the Fisher matrix is j j^T, j its gradient."""
    damping = 1e-2
    if kind == "sequence":
        model: nn.Module = nn.Linear(4, 3, bias=bias)
        x, positions = random(1, 5, 2, 4), (1, 2)
    else:
        model = nn.Conv2d(2, 3, 2, padding=1, stride=2, bias=bias)
        x, positions = random(1, 2, 5, 4), (2, 3)
    model.double().to(device)
    options = {"damping": damping, "eps": 1e-14, "damping_split": "exact", **BARE}
    optimizer = torchium.KFAC(model, weight_sharing="reduce", **options)
    label = torch.tensor([2], device=device)
    F.cross_entropy(model(x.to(device)).mean(positions), label).backward()
    j = torch.cat([p.grad.flatten() for p in model.parameters()])
    for i, p in enumerate(model.parameters()):
        p.grad += random(*p.shape, seed=i).to(device)
    v = torch.cat([p.grad.flatten() for p in model.parameters()])
    d = torch.cat([step.flatten() for step in updates(model, optimizer)])
    fisher = torch.outer(j, j) + damping * torch.eye(len(j), dtype=j.dtype, device=device)
    assert_close_in_norm(d, torch.linalg.solve(fisher, v), 1e-8)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("batch_averaged", [True, False])
def test_a_step_equals_solves_by_hand(split, batch_averaged, device):
    """Two layers, with inputs and output gradients by the chain rule."""
    damping, N = 0.02, 6
    model = mlp(4, 5, 3).to(device)
    x, target = random(N, 4).to(device), random(N, 3, seed=1).to(device)
    optimizer = torchium.KFAC(
        model,
        damping=damping,
        eps=0.0,
        damping_split=split,
        batch_averaged=batch_averaged,
        **BARE,
    )
    losses = (model(x) - target).square().sum(1) / 2
    (losses.mean() if batch_averaged else losses.sum()).backward()

    first, _, second = model
    hidden = torch.tanh(x @ first.weight.mT + first.bias)
    residual = hidden @ second.weight.mT + second.bias - target
    behind = residual @ second.weight * (1 - hidden**2)
    expected = []
    for layer, a, g in [(first, x, behind), (second, hidden, residual)]:
        a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        A, G = a.mT @ a / N, g.mT @ g / N
        V = torch.cat([layer.weight.grad, layer.bias.grad.unsqueeze(1)], 1)
        eye_A, eye_G = (torch.eye(len(M), dtype=M.dtype, device=device) for M in (A, G))
        if split == "exact":
            F_damped = torch.kron(G, A) + damping * torch.kron(eye_G, eye_A)
            D = torch.linalg.solve(F_damped, V.flatten()).view_as(V)
        else:
            ratio = (A.trace() / len(A)) / (G.trace() / len(G))
            pi = ratio.sqrt() if split == "pi" else 1.0
            D = torch.linalg.solve(G + damping**0.5 / pi * eye_G, V)
            D = D @ torch.linalg.inv(A + pi * damping**0.5 * eye_A)
        expected += [D[:, :-1], D[:, -1]]
    assert_each_close_in_norm(updates(model, optimizer), expected, 1e-9)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_over_its_whole_input_is_a_linear_layer(split, bias, device):
    convolution = nn.Sequential(nn.Conv2d(2, 5, (3, 4), bias=bias), nn.Flatten()).double()
    linear = nn.Sequential(nn.Flatten(), nn.Linear(24, 5, bias=bias)).double()
    linear.load_state_dict(
        {"1." + k[2:]: v.view(linear[1].get_parameter(k[2:]).shape)
         for k, v in convolution.state_dict().items()}
    )  # fmt: skip
    results = []
    for model in (convolution.to(device), linear.to(device)):
        optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=2, damping_split=split)
        for step in range(4):
            x = random(6, 2, 3, 4, seed=step).to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.arange(6, device=device) % 5).backward()
            optimizer.step()
        results.append([p.detach().flatten() for p in model.parameters()])
    assert_each_close_in_norm(*results, 1e-10)


# Against the reference


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


@ignore_fallback
@pytest.mark.parametrize(("name", "options", "split"), in_turn(MODELS, OPTIONS, SPLITS))
def test_training_follows_the_reference(name, options, split, device):
    model, shape = make_model(name)
    reference = copy.deepcopy(model)
    train_reference(reference, shape, 5, **OPTIONS[options], damping_split=split)
    model.to(device)
    optimizer = torchium.KFAC(model, **OPTIONS[options], damping_split=split)
    for step in range(5):
        x, y = (t.to(device) for t in batch_of(shape, step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_each_close_in_norm(model.parameters(), reference.parameters(), 1e-8)


# Invariants


@ignore_fallback
@pytest.mark.parametrize(
    ("name", "sizes", "split"),
    in_turn(
        ["mlp", "tied", "tied_head", "convolutions", "deconvolutions"],
        [(4, 4), (1, 5, 2), (8,)],
        SPLITS,
    ),
)
def test_micro_batches_equal_one_batch(name, sizes, split, device):
    """Each brings its share of the mean loss, in a separate backward pass."""
    results = []
    for pieces in (sizes, (sum(sizes),)):
        model, shape = make_model(name)
        model.to(device)
        optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=1, damping_split=split)
        for step in range(3):
            x, y = (t.to(device) for t in batch_of(shape, step, sum(sizes)))
            optimizer.zero_grad()
            for part_x, part_y in zip(x.split(pieces), y.split(pieces), strict=True):
                loss = F.cross_entropy(model(part_x), part_y) * len(part_x) / len(x)
                loss.backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert_each_close_in_norm(*results, 1e-10)


def factors_of(optimizer: torchium.KFAC) -> list[Tensor]:
    states = [s for s in optimizer.state.values() if "A" in s]
    return [state[key] for state in states for key in ("A", "G")]


@ignore_fallback
@pytest.mark.parametrize("name", ["mlp", "repeated", "tied_head", "convolutions", "deconvolutions"])
def test_a_sum_has_the_factors_of_the_mean(name, device):
    """batch_averaged states which of the two the loss is."""
    results = []
    for reduction in ("mean", "sum"):
        model, shape = make_model(name)
        model.to(device)
        scale = 1.0 if reduction == "mean" else 1 / 8
        optimizer = torchium.KFAC(
            model,
            batch_averaged=reduction == "mean",
            damping_split="exact",
            momentum=0.9,
            kl_clip=None,
            lr=0.1 * scale,  # the gradient is 8 times larger
            TCov=1,
        )
        for step in range(3):
            x, y = (t.to(device) for t in batch_of(shape, step, 8))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
        results.append([*factors_of(optimizer), *(p.detach() for p in model.parameters())])
    assert len(results[0]) > 6
    assert_each_close_in_norm(*results, 1e-10)


@ignore_fallback
@pytest.mark.parametrize("name", ["convolutions", "tied_head"])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_loss_scale_cancels(unscale, name, device):
    results = []
    for enabled in (False, True):
        model, shape = make_model(name)
        model.to(device)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=enabled)
        optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=1, grad_scaler=scaler)
        for step in range(3):
            x, y = (t.to(device) for t in batch_of(shape, step))
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # changes only V
            scaler.step(optimizer)
            scaler.update()
        results.append([*factors_of(optimizer), *(p.detach() for p in model.parameters())])
    assert_each_close_in_norm(*results, 1e-10)


def test_clipping_changes_the_gradient_and_not_the_factors():
    x, y = batch_of((4,), 0)
    steps, factors = [], []
    for clip in (None, 1e-3):
        model = mlp(4, 6, 3)
        optimizer = torchium.KFAC(model, **BARE)
        F.cross_entropy(model(x), y).backward()
        scale = 1.0
        if clip is not None:
            scale = clip / float(nn.utils.clip_grad_norm_(model.parameters(), clip))
        steps.append([d / scale for d in updates(model, optimizer)])
        factors.append(factors_of(optimizer))
    for pair in (steps, factors):
        assert_each_close_in_norm(*pair, 1e-5)


@pytest.mark.parametrize("layer", [lambda: nn.Linear(4, 3), lambda: nn.LayerNorm(4)])
def test_weight_decay_is_divided_by_the_damping_where_factors_are_zero(layer):
    """Each parameter has the decay of its own group, and the preconditioner of its weight."""
    model = layer().double()
    weight, bias = model.parameters()
    start = nn.init.normal_(weight).detach().clone(), nn.init.normal_(bias).detach().clone()
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias]}]
    optimizer = torchium.KFAC(groups, lr=0.003, damping=0.01, kl_clip=None, damping_split="exact")
    (0 * model(random(8, 4))).sum().backward()  # zero G
    optimizer.step()
    near = {"rtol": 1e-5, "atol": 1e-5}  # eps is the least eigenvalue
    kept = torch.full_like(weight, 1 - 0.003 * 0.1 / 0.01)
    torch.testing.assert_close(weight / start[0], kept, **near)
    torch.testing.assert_close(bias, start[1], **near)


# Another implementation


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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("seed", "split"), [(s, SPLITS[s % 3]) for s in range(8)])
def test_directions_agree_with_curvlinops(seed, sharing, split, reduction):
    damping = 0.01
    model, x = random_network(seed)
    y = torch.arange(len(x)) % 3
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    options = {
        "pi": {"damping": damping, "use_heuristic_damping": True},
        "plain": {"damping": (damping**0.5, damping**0.5)},
        "exact": {"damping": damping, "use_exact_damping": True},
    }
    if reduction == "sum":  # curvlinops also sums the Fisher matrix over samples: G is N times ours
        options["exact"]["damping"] = damping * len(x)
        options["pi"]["damping"] = damping * len(x)
        options["plain"]["damping"] = (damping**0.5, damping**0.5 * len(x))
    optimizer = torchium.KFAC(
        model,
        damping=damping,
        eps=0.0,
        damping_split=split,
        weight_sharing=sharing,
        batch_averaged=reduction == "mean",
        **BARE,
    )
    loss_fn(model(x), y).backward()
    scale = 1.0 if reduction == "mean" else len(x)
    expected = curvlinops_directions(
        model, loss_fn, x, y, "empirical", sharing, options[split], scale
    )
    assert_each_close_in_norm(updates(model, optimizer), expected, 1e-6)
