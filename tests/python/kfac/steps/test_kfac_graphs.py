"""Steps that K-FAC captures in CUDA graphs equal launched steps, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchium
from cuda_waits import no_waits
from graph_runs import (
    GraphRun,
    assert_a_replay_and_little_else,
    assert_both_same,
    assert_same_reports,
    change_learning_rates_between_replays,
    freeze,
    reload,
    replace_data,
    set_option,
    skip_a_step,
    thaw,
)
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:KFAC")]

CLASSES = 5


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(40, 96), nn.LayerNorm(96), nn.ReLU()),  # split products
        *(nn.Linear(96, 24, bias=False), nn.ReLU(), nn.Linear(24, CLASSES)),
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (40,)),
    "convnet": (convnet, (3, 10, 10)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {"damping_split": "exact"},
    "cholesky": {"solver": "cholesky"},
    "unclipped": {"kl_clip": None, "momentum": 0.0, "weight_decay": 0.1},
    "diagonals": {"max_factor_size": 30},
    "reduce": {"weight_sharing": "reduce"},
    "seldom": {"TCov": 4, "TInv": 12},
    "up": {"maximize": True, "lr": 1e-4},
}
LAUNCHED: dict[str, dict[str, Any]] = {
    "ekfac": {"damping_split": "exact", "ekfac": True},
    "inverse_free": {"solver": "inverse_free", "TInv": 10},
    "adaptive": {"momentum": 0.0, "adaptive_damping": True},
    "bfloat16": {"factor_dtype": "bfloat16"},
    "every step": {"TCov": 1},
}


class Run(GraphRun):
    """A model and its optimizer, which are trained on the same batches as others."""

    def __init__(self, graphs: str | bool, name: str = "perceptron", **options: Any) -> None:
        super().__init__()
        make, self.shape = MODELS[name]
        torch.manual_seed(0)
        self.model = make().cuda()
        options = {"lr": 0.01, "damping": 0.1, "TCov": 5, "TInv": 5, **options}
        self.optimizer = torchium.KFAC(self.model, graphs=graphs, **options)

    def backward(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(12, *self.shape, generator=generator).cuda()
        y = torch.randint(CLASSES, (12,), generator=generator).cuda()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.held += [p.grad for p in self.model.parameters() if p.grad is not None]


def both(name: str = "perceptron", **options: Any) -> tuple[Run, Run]:
    return Run("always", name, **options), Run("never", name, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", OPTIONS)
def test_replayed_steps_equal_launched_ones(name, options):
    runs = both(name, **OPTIONS[options])
    for each in runs:
        each.train(0, 28)
    assert runs[0].graphs > 0
    assert_both_same(runs)
    assert_same_reports(runs)


@pytest.mark.parametrize("options", LAUNCHED)
def test_steps_without_a_graph_are_launched(options):
    runs = both(**LAUNCHED[options])
    for each in runs:
        each.train(0, 12)
    assert runs[0].graphs == 0
    assert_both_same(runs)


def test_replays_are_the_default():
    run = Run("auto")
    run.train(0, 9)
    assert run.graphs == 1
    assert "graphs: auto" in repr(run.optimizer)


def test_a_replayed_step_launches_a_graph_and_little_else():
    assert_a_replay_and_little_else(Run("always", TCov=20, TInv=20), 9)


def test_no_wait():
    run = Run("always")
    for index in range(14):
        run.backward(index)
        torch.cuda.synchronize()
        with no_waits() if index > 3 else torch.no_grad():  # the first factors are new state
            run.optimizer.step()
    assert run.graphs > 0


def test_learning_rates_change_between_replays():
    runs = both()
    change_learning_rates_between_replays(runs, 24)
    assert runs[0].graphs == 1
    assert_both_same(runs)


def with_groups(graphs: str) -> Run:
    run = Run(graphs)
    head, body = list(run.model[-1].parameters()), list(run.model[:-1].parameters())
    groups = [{"params": body}, {"params": head, "lr": torch.tensor(0.02, device="cuda")}]
    run.optimizer = torchium.KFAC(groups, lr=0.01, damping=0.1, graphs=graphs)
    return run


def test_groups_with_other_learning_rates():
    runs = (with_groups("always"), with_groups("never"))
    for each in runs:
        each.train(0, 9)
        each.optimizer.param_groups[1]["lr"].mul_(0.5)
        each.train(9, 9)
        each.optimizer.param_groups[0]["lr"] = 0.004
        each.train(18, 9)
    assert runs[0].graphs == 1
    assert_both_same(runs)


def scale_inverses(run: Run) -> None:
    for state in run.optimizer.state.values():
        if "A_inverse" in state:
            state["A_inverse"].mul_(0.5)


CHANGES: dict[str, Callable[[Run], None]] = {
    "freeze": freeze, "thaw": thaw, "reload": reload, "data": replace_data,
    "inverses": scale_inverses, "damping": set_option(damping=0.3),
    "momentum": set_option(momentum=0.2), "kl_clip": set_option(kl_clip=1e-5),
    "TInv": set_option(TInv=3), "up": set_option(maximize=True),
    "exact": set_option(damping_split="exact"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name):
    runs = both()
    for each in runs:
        if name == "thaw":
            freeze(each)
        each.train(0, 14)
    assert runs[0].graphs > 0
    for each in runs:
        CHANGES[name](each)
        each.train(14, 20)
    assert runs[0].graphs > 0
    assert_both_same(runs)


def test_another_precision_of_products():
    runs = both()
    precision = torch.get_float32_matmul_precision()
    try:
        for each in runs:
            for part, name in enumerate(("highest", "high", "highest")):
                torch.set_float32_matmul_precision(name)
                each.train(14 * part, 14)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert runs[0].graphs > 0
    assert_both_same(runs)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_skips_replayed_steps(unscales):
    runs = both()
    for each in runs:
        scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=4)
        each.optimizer.grad_scaler = scaler if unscales else None
        for index in range(19):
            generator = torch.Generator("cuda").manual_seed(index)
            x = torch.randn(12, *each.shape, device="cuda", generator=generator)
            each.optimizer.zero_grad()
            scaler.scale(each.model(x).square().mean()).backward()
            if index == 13:
                next(each.model.parameters()).grad[0, 0] = float("inf")
            if unscales:
                scaler.unscale_(each.optimizer)
            scaler.step(each.optimizer)
            scaler.update()
            torch.cuda.synchronize()  # so that the next refresh follows the skip in both runs
    assert runs[0].graphs > 0
    assert_both_same(runs)
    step = next(iter(runs[0].optimizer.state.values()))["step"]
    assert step.item() == 18


def skip_three_steps(run: Run) -> None:
    """Raises in the last of them, if the device is quick, or else in check_errors()."""
    for index in range(3):
        run.backward(index)
        next(run.model.parameters()).grad.fill_(float("inf"))
        run.optimizer.step()
    run.optimizer.check_errors()


def test_skipped_steps_are_reported():
    runs = both()
    for each in runs:
        each.train(0, 12)
        skip_a_step(each, 12, 9)
    assert_both_same(runs)
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        skip_three_steps(runs[0])
