"""Multi-tensor steps of diagonal Adagrad and of K-FAC, against float64 on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchium
from cuda_launches import launches
from kfac_problems import MODELS, OPTIONS, SPLITS, batch_of, make_model
from optimizer_cases import assert_same, ignore_fallback, set_gradients, values
from torch import Tensor, nn

pytestmark = [pytest.mark.cuda, ignore_fallback]


@pytest.fixture(autouse=True)
def float32_convolutions() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def relative_error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.detach().double()
    difference = (actual.detach().cpu().double() - expected).norm()
    return float(difference / expected.norm() if expected.any() else difference)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative to 1 (parameters cross zero), or to larger numbers."""
    difference = (actual.detach().cpu().double() - expected.detach()).norm()
    return float(difference / (expected.detach().norm() + expected.numel() ** 0.5))


# Adagrad

SHAPES = [(), (1,), (7,), (64,), (0,), (33, 70), (5, 3, 3, 3), (300, 100)]
ADAGRAD: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True, "eps": 1e-3},
    "sum": {"initial_accumulator_value": 0.5, "lr": 2.0},
    "no_eps": {"eps": 0.0},
}


def adagrad_parameters(device: str, dtype: torch.dtype, layout: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in SHAPES:
        value = torch.randn(shape, generator=generator).to(device, dtype)
        if layout == "permuted" and value.dim() == 2:
            value = value.t().contiguous().t()
        elif layout == "permuted" and value.dim() == 4:
            value = value.to(memory_format=torch.channels_last)
        elif layout == "offset":  # not a multiple of four elements
            value = (
                torch.empty(value.numel() + 1, device=device, dtype=dtype)[1:]
                .view(shape)
                .copy_(value)
            )
        params.append(nn.Parameter(value))
    return params


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "offset"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 6e-3)]
)
@pytest.mark.parametrize("options", ADAGRAD)
def test_adagrad_follows_the_cpu(
    options: str, dtype: torch.dtype, tolerance: float, layout: str
) -> None:
    results = []
    for device, type_ in (("cpu", torch.float64), ("cuda", dtype)):
        params = adagrad_parameters(device, dtype, layout)
        if device == "cpu":
            params = [nn.Parameter(p.detach().to(type_)) for p in params]
        optimizer = torchium.Adagrad(params, **{"lr": 0.1, **ADAGRAD[options]})
        for seed in range(6):
            set_gradients(params, seed)
            for p in params:
                p.grad = p.grad.to(dtype).to(p.dtype)  # the same numbers
            params[3].grad[:8] = 0.0
            optimizer.step()
        optimizer.check_errors()
        results.append(params)
    for expected, actual in zip(*results, strict=True):
        assert actual.numel() == 0 or error(actual, expected) <= tolerance


def test_adagrad_takes_a_learning_rate_from_the_device() -> None:
    results = []
    for lr in (0.1, torch.tensor(0.1, device="cuda", dtype=torch.float64)):
        params = adagrad_parameters("cuda", torch.float32, "contiguous")
        optimizer = torchium.Adagrad(params, lr=lr, lr_decay=0.01)
        for seed in range(3):
            set_gradients(params, seed)
            optimizer.step()
        results.append([p.detach() for p in params])
    assert_same(*results)


def test_a_weight_decay_that_is_set_between_steps_counts() -> None:
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        params = [nn.Parameter(torch.ones(40, device=device, dtype=dtype))]
        optimizer = torchium.Adagrad(params, lr=0.1)
        for seed in range(4):
            optimizer.param_groups[0]["weight_decay"] = 0.5 * seed
            set_gradients(params, seed)
            optimizer.step()
        results.append(params[0])
    assert relative_error(results[1], results[0]) <= 1e-5


def test_a_captured_step_of_adagrad_is_the_eager_one() -> None:
    results = []
    for captured in (False, True):
        params = adagrad_parameters("cuda", torch.float32, "contiguous")
        optimizer = torchium.Adagrad(params, lr=0.1, lr_decay=0.1)
        set_gradients(params, 0)
        optimizer.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for seed in range(1, 4):
            gradients = [p.grad for p in params]
            set_gradients(params, seed)
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient.copy_(p.grad)  # the tensor that the graph reads
            graph.replay() if captured else optimizer.step()
        results.append([p.detach() for p in params])
    assert_same(results[1], results[0])


def test_launches_of_adagrad_do_not_grow_with_the_number_of_parameters() -> None:
    counts = []
    for number in (4, 64):
        params = [nn.Parameter(torch.randn(16, 24, device="cuda")) for _ in range(number)]
        optimizer = torchium.Adagrad(params, weight_decay=0.1, lr_decay=0.1, graphs=False)
        for seed in range(3):
            set_gradients(params, seed)
            optimizer.step()
        counts.append(launches(optimizer))
    assert counts[0] == counts[1] < 10


# Parameters that the kernels support, and others, in one group

MIXED = {
    "adagrad": lambda params: torchium.Adagrad(params, lr=0.1, weight_decay=0.1),
    "shampoo": lambda params: torchium.Shampoo(
        params, lr=0.1, eps=0.3, update_freq=2, grafting="adam", betas=(0.9, 0.95)
    ),
}


def mixed_parameters(device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """The second and the last are in float64."""
    shapes = [(16, 24), (16, 24), (40,), (24, 16), (7,)]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    dtypes = [dtype, torch.float64, dtype, dtype, torch.float64]
    return [nn.Parameter(v.to(device, d)) for v, d in zip(values, dtypes, strict=True)]


@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED.keys())
def test_each_parameter_of_a_mixed_group_follows_the_cpu(make: Any) -> None:
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        params = mixed_parameters(device, dtype)
        optimizer = make(params)
        for seed in range(5):
            set_gradients(params, seed)
            optimizer.step()
        optimizer.check_errors()
        results.append(params)
    for expected, actual in zip(*results, strict=True):
        assert error(actual, expected) <= (1e-12 if actual.dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED.keys())
@pytest.mark.parametrize("victim", range(5))
def test_a_gradient_that_is_not_finite_skips_all_of_a_mixed_group(make: Any, victim: int) -> None:
    params = mixed_parameters("cuda", torch.float32)
    optimizer = make(params)
    for seed in range(2):
        set_gradients(params, seed)
        optimizer.step()
    optimizer.check_errors()
    before = copy.deepcopy([[p.detach(), dict(optimizer.state[p])] for p in params])
    set_gradients(params, 2)
    params[victim].grad.view(-1)[0] = float("nan")
    optimizer.step()
    optimizer.check_errors()
    for p, (value, state) in zip(params, before, strict=True):
        assert_same([p.detach(), *optimizer.state[p].values()], [value, *state.values()])


# K-FAC


def wide() -> tuple[nn.Module, tuple[int, ...]]:
    """Layers with products on tensor cores: of orders that need padding and others, and in groups."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(
            *(nn.Conv2d(3, 40, 3, padding=1), nn.Tanh(), nn.Conv2d(40, 80, 3, stride=2, groups=2)),
            *(
                nn.Tanh(),
                nn.Flatten(),
                nn.Linear(320, 64),
                nn.Tanh(),
                nn.Linear(64, 32, bias=False),
            ),
            *(nn.Tanh(), nn.Linear(32, 3)),
        )
        return model.double(), (3, 5, 6)


def train(
    name: str, device: str, dtype: torch.dtype, steps: int = 5, layout: str = "", **options: Any
) -> list[Tensor]:
    """The changes of the parameters."""
    model, shape = wide() if name == "wide" else make_model(name)
    model.to(device, dtype)
    start = values(model)
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)
    optimizer = torchium.KFAC(model, **options)
    for step in range(steps):
        x, y = batch_of(shape, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device, dtype)), y.to(device)).backward()
        if layout == "frozen" and step % 2 == 1:
            for key, p in model.named_parameters():
                p.grad = None if key.endswith("bias") else p.grad
        optimizer.step()
    optimizer.check_errors()
    return [p - s for p, s in zip(values(model), start, strict=True)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_kfac_follows_the_cpu(name: str, options: str, split: str) -> None:
    arguments = {**OPTIONS[options], "damping_split": split}
    expected = train(name, "cpu", torch.float64, **arguments)
    actual = train(name, "cuda", torch.float32, **arguments)
    for p, q in zip(actual, expected, strict=True):
        assert relative_error(p, q) <= 5e-4


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", ["", "channels_last", "frozen"])
@pytest.mark.parametrize("name", ["convolutions", "wide"])
def test_kfac_knows_other_layouts_and_biases_without_gradient(
    name: str, layout: str, split: str
) -> None:
    """`frozen`: in every second step no bias has a gradient."""
    arguments = {**OPTIONS["every_step"], "damping_split": split, "layout": layout}
    expected = train(name, "cpu", torch.float64, **arguments)
    actual = train(name, "cuda", torch.float32, **arguments)
    # Inverses of orders above 128 have errors of up to 1e-4 in each of the five steps.
    tolerance = 2e-3 if name == "wide" else 5e-4
    for p, q in zip(actual, expected, strict=True):
        assert relative_error(p, q) <= tolerance


@pytest.mark.parametrize("split", ["pi", "plain"])
def test_products_on_tensor_cores_are_nearly_those_of_float32(split: str) -> None:
    """d = (G + ..I)^-1 V (A + ..I)^-1 with the inverses of the state."""
    lr = 2.0**10  # parameters round far less than they move
    model, shape = wide()
    model.to("cuda", torch.float32)
    optimizer = torchium.KFAC(model, lr=lr, momentum=0.0, kl_clip=None, damping_split=split)
    x, y = batch_of(shape, 0)
    F.cross_entropy(model(x.to("cuda", torch.float32)), y.to("cuda")).backward()
    start = [p.detach().double() for p in model.parameters()]
    optimizer.step()
    moved = {p: s - p.detach().double() for p, s in zip(model.parameters(), start, strict=True)}
    for layer in (m for m in model if hasattr(m, "weight")):
        G, A = (optimizer.state[layer.weight][key].double() for key in ("G_inverse", "A_inverse"))
        with_bias = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
        rows = [p.grad.double().reshape(len(G), G.shape[1], -1) for p in with_bias]
        V = torch.cat(rows, -1)
        expected = (lr * G @ V @ A).cpu()
        actual = torch.cat([moved[p].reshape(len(G), G.shape[1], -1) for p in with_bias], -1)
        # Inverses may cancel much of the gradient.
        in_float32 = lr * (G.float() @ V.float() @ A.float())
        assert relative_error(actual, expected) <= 8 * relative_error(in_float32, expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kl_clip", [None, 1e-5])
def test_kfac_with_and_without_a_bound_of_the_step(kl_clip: float | None, momentum: float) -> None:
    arguments = {"lr": 0.01, "TCov": 1, "TInv": 1, "kl_clip": kl_clip, "momentum": momentum}
    expected = train("mlp", "cpu", torch.float64, damping=0.1, **arguments)
    actual = train("mlp", "cuda", torch.float32, damping=0.1, **arguments)
    for p, q in zip(actual, expected, strict=True):
        assert relative_error(p, q) <= 5e-4


@pytest.mark.parametrize("split", SPLITS)
def test_two_runs_of_kfac_agree_bit_for_bit(split: str) -> None:
    runs = [train("mlp", "cuda", torch.float32, damping_split=split, lr=0.05) for _ in range(2)]
    assert_same(runs[0], runs[1])


def test_a_skipped_step_of_kfac_changes_no_bit() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).cuda()
    optimizer = torchium.KFAC(model, lr=0.05, TCov=2, TInv=2, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6, device="cuda")).square().sum(1).mean().backward()
        optimizer.step()
    before = values(model)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    model[3].weight.grad[1, 2] = float("inf")
    optimizer.step()
    optimizer.check_errors()
    assert_same(values(model), before)
    after = optimizer.state_dict()["state"]
    for number, entries in state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(after[number][key], value, rtol=0, atol=0)


class MixedModel(nn.Module):
    """Layers in float32, and a layer and a vector in float64, which the kernels do not support."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(24, 24) for _ in range(layers)))
        self.double_layer = nn.Linear(24, 24, dtype=torch.float64)
        self.shift = nn.Parameter(torch.zeros(24, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(24))
        self.last = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.scale.dtype)) * self.scale
        x = self.double_layer(x.double()) + self.shift
        return self.last(x.to(self.scale.dtype).tanh())


def backward_pass(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    p = next(model.parameters())
    x = torch.randn(32, 24, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x.to(p.device, p.dtype)).square().sum(1).mean().backward()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("options", [{}, {"kl_clip": 1e-5}, {"weight_decay": 0.1, "momentum": 0.0}])
def test_each_layer_of_a_mixed_model_follows_the_cpu(options: dict[str, Any], split: str) -> None:
    """The factor of kl_clip is one number for both kinds."""
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = MixedModel()
        model = model.double() if device == "cpu" else model.cuda()
        start = values(model)
        arguments = {"lr": 0.01, "damping": 0.1, "TCov": 1, "TInv": 2, "damping_split": split}
        optimizer = torchium.KFAC(model, **{**arguments, **options})
        for seed in range(4):
            backward_pass(model, optimizer, seed)
            optimizer.step()
        optimizer.check_errors()
        results.append([p - s for p, s in zip(values(model), start, strict=True)])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert relative_error(actual, expected) <= 5e-4


@pytest.mark.parametrize("victim", ["first.1.weight", "double_layer.bias", "shift", "scale"])
def test_a_gradient_that_is_not_finite_skips_all_of_a_mixed_model(victim: str) -> None:
    model = MixedModel().cuda()
    optimizer = torchium.KFAC(model, lr=0.01, TCov=1, TInv=1, weight_decay=0.1)
    for seed in range(2):
        backward_pass(model, optimizer, seed)
        optimizer.step()
    optimizer.check_errors()
    before = copy.deepcopy([values(model), [dict(optimizer.state[p]) for p in model.parameters()]])
    backward_pass(model, optimizer, 2)
    model.get_parameter(victim).grad.view(-1)[3] = float("nan")
    optimizer.step()
    optimizer.check_errors()
    assert_same(values(model), before[0])
    for p, state in zip(model.parameters(), before[1], strict=True):
        assert_same(list(optimizer.state[p].values()), list(state.values()))


def kfac_launches(model: nn.Module, make: Any = torchium.KFAC, **options: Any) -> int:
    model.cuda()
    optimizer = make(model, lr=1e-4, **options)
    for seed in range(3):
        backward_pass(model, optimizer, seed)
        optimizer.step()
    backward_pass(model, optimizer, 3)
    return launches(optimizer)


def deep_model(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(layers)))


class Normed(nn.Module):
    """A linear layer between norms of several kinds."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        kinds = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d)
        self.norms = nn.Sequential(*(kinds[i % 3](24) for i in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norms(self.linear(x))


@pytest.mark.parametrize("TCov", [1, 10])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torchium.KFAC, {"TInv": 100}),
        (torchium.KFACPreconditioner, {"inv_update_steps": 100}),
    ],
)
def test_launches_of_a_step_do_not_grow_with_the_number_of_norms(
    make: Any, options: dict[str, Any], TCov: int
) -> None:
    update = {"TCov" if make is torchium.KFAC else "factor_update_steps": TCov}
    counts = [kfac_launches(Normed(number), make, **options, **update) for number in (3, 60)]
    assert counts[0] == counts[1] < 30


def test_norms_add_one_launch_to_a_step() -> None:
    counts = [kfac_launches(Normed(number), TCov=1, TInv=100) for number in (0, 6)]
    assert counts[1] <= counts[0] + 1


@pytest.mark.parametrize(("split", "most"), [("pi", 25), ("exact", 35)])
@pytest.mark.parametrize("make", [deep_model, MixedModel], ids=["float32", "mixed"])
def test_launches_of_kfac_do_not_grow_with_the_number_of_layers(
    make: Any, split: str, most: int
) -> None:
    """Between two updates of the factors. Layers in float64 have launches of their own."""
    counts = [
        kfac_launches(make(number), TCov=10, TInv=10, damping_split=split) for number in (3, 40)
    ]
    assert counts[0] == counts[1] < (most if make is deep_model else 150)


def test_launches_of_a_preconditioner_do_not_grow_with_the_number_of_layers() -> None:
    counts = [
        kfac_launches(deep_model(number), torchium.KFACPreconditioner, inv_update_steps=10)
        for number in (3, 40)
    ]
    assert counts[0] == counts[1] < 30


def test_launches_of_an_update_of_the_factors_do_not_grow_with_the_number_of_layers() -> None:
    counts = [kfac_launches(deep_model(number), TCov=1, TInv=100) for number in (3, 40)]
    assert counts[0] == counts[1] < 30


@pytest.mark.parametrize("split", ["pi", "plain"])
def test_launches_of_inversions_hardly_grow_with_the_number_of_layers(split: str) -> None:
    """Only those that join the matrices do, in batches."""
    few, many = (
        kfac_launches(deep_model(number), TCov=1, TInv=1, damping_split=split) for number in (3, 40)
    )
    assert many < few + 20
