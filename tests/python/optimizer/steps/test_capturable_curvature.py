"""K-FAC and natural gradient with ``capturable=True``: CUDA graphs of whole training iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchium
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore:KFAC")
CLASSES = 5


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(40, 96), nn.LayerNorm(96), nn.Tanh()),  # split products
        *(nn.Linear(96, 24), nn.Tanh(), nn.Linear(24, CLASSES)),
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (40,)),
    "convnet": (convnet, (3, 8, 8)),
}


def batch(shape: tuple[int, ...], step: int, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, *shape, generator=generator)
    return x.to(device), torch.randint(CLASSES, (16,), generator=generator).to(device)


def train(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    outputs = model(x)
    if optimizer.param_groups[0]["fisher"] != "empirical":
        optimizer.update_curvature(outputs, "cross_entropy")
    F.cross_entropy(outputs, y).backward()
    optimizer.step()


def factors(optimizer: Any) -> dict[str, Tensor]:
    return {
        f"{i}.{key}": value.clone()
        for i, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def assert_inverts(state: dict[str, Tensor], damping: float) -> None:
    for name in ("A", "G"):
        damped = state[name] + damping**0.5 * torch.eye(state[name].shape[-1]).to(state[name])
        torch.testing.assert_close(state[f"{name}_inverse"], torch.linalg.inv(damped))


def test_only_update_preconditioners_inverts():
    torch.manual_seed(0)
    model = perceptron().double()
    options = {"damping_split": "plain", "damping": 0.04, "TCov": 100, "TInv": 2}
    optimizer = torchium.KFAC(model, capturable=True, **options)
    optimizer.update_preconditioners()  # there are no factors yet
    weight = optimizer.state[model[0].weight]
    for step in range(6):
        x, y = batch((40,), step)
        before = factors(optimizer)
        train(optimizer, model, x.double(), y)
        after = factors(optimizer)
        if step == 0:
            assert_inverts(weight, 0.04)  # in the step in which they are new
            continue
        assert not torch.equal(after["0.A"], before["0.A"])  # whatever TCov is
        assert torch.equal(after["0.A_inverse"], before["0.A_inverse"])
        if step == 3:
            optimizer.param_groups[0]["damping"] = 0.09
            optimizer.update_preconditioners()
            assert_inverts(weight, 0.09)
            assert torch.equal(weight["A"], after["0.A"])


def test_update_preconditioners_without_capturable():
    torch.manual_seed(0)
    model = perceptron().double()
    optimizer = torchium.KFAC(model, damping_split="plain", damping=0.04, TCov=1, TInv=100)
    for step in range(3):
        x, y = batch((40,), step)
        train(optimizer, model, x.double(), y)
    weight = optimizer.state[model[0].weight]
    with pytest.raises(AssertionError):
        assert_inverts(weight, 0.04)
    optimizer.update_preconditioners()
    assert_inverts(weight, 0.04)


def test_inverses_are_renewed_by_the_next_step_after_a_load():
    torch.manual_seed(0)
    model = perceptron().double()
    optimizer = torchium.KFAC(model, damping_split="plain", damping=0.04, capturable=True)
    x, y = batch((40,), 0)
    train(optimizer, model, x.double(), y)
    train(optimizer, model, x.double(), y)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.update_preconditioners()
    A = optimizer.state[model[0].weight]["A"].clone()
    train(optimizer, model, x.double(), y)
    damped = A + 0.2 * torch.eye(A.shape[-1], dtype=A.dtype)
    torch.testing.assert_close(
        optimizer.state[model[0].weight]["A_inverse"], torch.linalg.inv(damped)
    )


def test_layers_of_other_steps_are_inverted_by_their_next_one():
    torch.manual_seed(0)
    body, heads = nn.Linear(40, 6), [nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)]
    model = nn.ModuleList([body, *heads]).double()
    optimizer = torchium.KFAC(model, damping_split="plain", damping=0.04, capturable=True)
    paths = [nn.Sequential(body, nn.Tanh(), head) for head in heads]
    for step in range(4):
        x, y = batch((40,), step)
        train(optimizer, paths[step % 2], x.double(), y)
    optimizer.update_preconditioners()
    for layer in (body, heads[1]):
        assert_inverts(optimizer.state[layer.weight], 0.04)
    first = optimizer.state[heads[0].weight]
    before = {key: first[key].clone() for key in ("A", "G")}
    train(
        optimizer, paths[0], *(t.double() if t.is_floating_point() else t for t in batch((40,), 9))
    )
    assert_inverts({**first, **before}, 0.04)
    inverse = first["A_inverse"].clone()
    train(optimizer, paths[0], x.double(), y)
    assert torch.equal(first["A_inverse"], inverse)


def test_second_moments_of_other_eigenvectors_do_not_count():
    def moments(calls: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = perceptron().double()
        optimizer = torchium.KFAC(model, damping_split="exact", ekfac=True, capturable=True)
        for step in range(3):
            x, y = batch((40,), step)
            train(optimizer, model, x.double(), y)
        optimizer.zero_grad()
        for _ in range(calls):
            F.cross_entropy(model(x.double()), y).backward()
        optimizer.update_preconditioners()
        state = optimizer.state[model[0].weight]
        before = state["second_moments"].clone()
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
        return before, state["second_moments"]

    before, after = moments(calls=1)
    assert torch.equal(after, before)
    before, after = moments(calls=0)
    assert not torch.equal(after, before)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (torchium.KFAC, {"solver": "inverse_free"}, "use another solver"),
        (torchium.KFAC, {"adaptive_damping": True, "momentum": 0.0}, "use adaptive_damping=False"),
        (torchium.NaturalGradient, {"update_freq": 2}, "use update_freq=1, got 2"),
        (torchium.NaturalGradient, {"nystrom_rank": 3}, "use nystrom_rank=0, got 3"),
        (
            torchium.NaturalGradient,
            {"adaptive_damping": True, "momentum": 0.0},
            "use adaptive_damping=False",
        ),
    ],
)
def test_options_that_capturable_excludes(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(perceptron(), capturable=True, **options)


def test_functions_of_the_step_are_refused():
    model = perceptron()
    optimizer = torchium.KFAC(model, damping=lambda step: 0.1 / step, capturable=True)
    with pytest.raises(ValueError, match="damping is a function of the step"):
        train(optimizer, model, *batch((40,), 0))


# ---- on a GPU

KFAC: dict[str, dict[str, Any]] = {
    "pi": {},
    "cholesky": {"solver": "cholesky"},
    "exact": {"damping_split": "exact"},
    "ekfac": {"damping_split": "exact", "ekfac": True},
    "unclipped": {"kl_clip": None, "momentum": 0.0, "weight_decay": 0.1},
    "mc": {"fisher": "mc"},
    "ggn": {"fisher": "ggn"},
    "no graphs": {"graphs": False},
}
NATURAL_GRADIENT: dict[str, dict[str, Any]] = {
    "gram": {"solver": "gram"},
    "explicit": {"solver": "explicit"},
    "cg": {"solver": "cg"},
    "ggn": {"fisher": "ggn", "max_norm": 0.5},
}
CASES = [(torchium.KFAC, name, options) for name, options in KFAC.items()] + [
    (torchium.NaturalGradient, name, options) for name, options in NATURAL_GRADIENT.items()
]


def run(make: Any, options: dict[str, Any], name: str, captures: bool) -> tuple[Any, Any]:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().cuda()
    lr = torch.tensor(0.05, device="cuda")
    optimizer = make(model, lr=lr, capturable=True, **options)
    x, y = batch(shape, 0, "cuda")

    def load(step: int) -> None:
        for target, values in zip((x, y), batch(shape, step), strict=True):
            target.copy_(values)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(4):
            load(step)
            train(optimizer, model, x, y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if captures:
        optimizer.zero_grad()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            train(optimizer, model, x, y)
    for step in range(4, 12):
        load(step)
        if captures:
            graph.replay()
        else:
            train(optimizer, model, x, y)
        if step % 3 == 0 and make is torchium.KFAC:
            optimizer.update_preconditioners()
        if step == 7:
            lr.mul_(0.5)
    optimizer.check_errors()
    assert all(int(state["step"]) == 12 for state in optimizer.state.values())
    return list(model.parameters()), factors(optimizer)


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("make", "case", "options"), CASES)
def test_replays_equal_launched_iterations(make, case, options, name):
    params, state = run(make, options, name, captures=False)
    replayed, replayed_state = run(make, options, name, captures=True)
    for p, q in zip(replayed, params, strict=True):
        if options.get("fisher") == "mc":  # perhaps from other random numbers
            assert p.isfinite().all()
        else:
            assert (p - q).norm() < 1e-3 * q.norm()
    assert replayed_state.keys() == state.keys()


@pytest.mark.cuda
@pytest.mark.parametrize("make", [torchium.KFAC, torchium.NaturalGradient])
def test_captures_that_are_refused(make):
    for options, steps, message in (
        ({}, 2, "the host decides in step"),
        ({"capturable": True}, 0, "run a step before the capture"),
    ):
        torch.manual_seed(0)
        model = perceptron().cuda()
        optimizer = make(model, lr=0.1, **options)
        x, y = batch((40,), 0, "cuda")
        F.cross_entropy(model(x), y).backward()  # so that the engine is ready
        optimizer.zero_grad()
        for _ in range(steps):
            train(optimizer, model, x, y)
        error = ""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            try:
                train(optimizer, model, x, y)
            except RuntimeError as refused:
                error = str(refused)
        assert message in error
        train(optimizer, model, x, y)
        optimizer.check_errors()


@pytest.mark.cuda
def test_a_replay_skips_a_step_that_is_not_finite():
    torch.manual_seed(0)
    model = perceptron().cuda()
    optimizer = torchium.KFAC(model, lr=0.1, capturable=True)
    x, y = batch((40,), 0, "cuda")
    train(optimizer, model, x, y)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        train(optimizer, model, x, y)
    x.fill_(float("nan"))
    before = [p.clone() for p in model.parameters()]
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        optimizer.check_errors()
