"""Steps that natural gradient captures in CUDA graphs equal launched steps, bitwise."""

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
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F

pytestmark = pytest.mark.cuda

CLASSES = 5


class Words(nn.Module):
    """An embedding that is the last layer too, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.last.weight = self.embedding.weight
        self.head = nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.norm(self.embedding(x))).tanh()
        return self.head(self.last(hidden).mean(1))


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 33), nn.ReLU()), nn.Linear(33, CLASSES)
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "perceptron": (perceptron, (24,), 0),
    "convnet": (convnet, (3, 10, 10), 0),
    "words": (Words, (7,), 20),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gram": {"solver": "gram", "momentum": 0.0, "max_norm": 0.5},
    "explicit": {"solver": "explicit"},
    "cg": {"solver": "cg", "eps": 1e-3},
    "seldom": {"update_freq": 5},
    "seldom explicit": {"update_freq": 5, "solver": "explicit", "max_norm": 0.1},
    "seldom cg": {"update_freq": 5, "solver": "cg", "eps": 1e-3},
    "seldom nystrom": {"update_freq": 6, "solver": "cg", "eps": 1e-3, "nystrom_rank": 4},
    "ggn": {"fisher": "ggn"},
    "adaptive": {"momentum": 0.0, "adaptive_damping": True},
    "up": {"maximize": True},
}


class Run(GraphRun):
    """A model and its optimizer, which are trained on the same batches as others."""

    def __init__(self, graphs: str | bool, name: str = "perceptron", **options: Any) -> None:
        super().__init__()
        make, self.shape, self.words = MODELS[name]
        torch.manual_seed(0)
        self.model = make().cuda()
        options = {"lr": 0.05, "damping": 0.5, **options}
        self.optimizer = torchium.NaturalGradient(self.model, graphs=graphs, **options)

    def batch(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = (
            torch.randint(self.words, (count, *self.shape), generator=generator)
            if self.words
            else torch.randn(count, *self.shape, generator=generator)
        )
        y = torch.randint(CLASSES, (count,), generator=generator)
        return x.cuda(), y.cuda()

    def backward(self, index: int, samples: int = 12) -> None:
        x, y = self.batch(index, samples)
        self.held.append(x)
        self.optimizer.zero_grad()
        outputs = self.model(x)
        if self.optimizer.param_groups[0]["fisher"] != "empirical":
            self.optimizer.update_curvature(outputs, "cross_entropy")
        F.cross_entropy(outputs, y).backward()


def both(name: str = "perceptron", **options: Any) -> tuple[Run, Run]:
    return Run("always", name, **options), Run("never", name, **options)


CASES = [
    *(("perceptron", options) for options in OPTIONS),
    *((name, options) for name in ("convnet", "words") for options in ("plain", "cg", "seldom")),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_replayed_steps_equal_launched_ones(name, options):
    runs = both(name, **OPTIONS[options])
    for each in runs:
        each.train(0, 23)
        torch.cuda.synchronize()  # iterations of conjugate gradients are known
        each.train(23, 7)
    assert runs[0].graphs > 0
    assert_both_same(runs)
    assert_same_reports(runs)


def test_replays_are_the_default():
    run = Run("auto")
    run.train(0, 6)
    assert run.graphs == 1
    assert "graphs: auto" in repr(run.optimizer)
    assert run.optimizer.report()["graph_bytes"] > 0


def test_a_replayed_step_launches_a_graph_and_copies():
    assert_a_replay_and_little_else(Run("always"), 6)


def test_no_wait():
    for options in ({}, {"solver": "cg", "eps": 1e-3}, {"update_freq": 3}):
        run = Run("always", **options)
        for index in range(8):
            run.backward(index)
            torch.cuda.synchronize()
            with no_waits():
                run.optimizer.step()
        assert run.graphs > 0


def test_iterations_are_captured_where_they_settle():
    run = Run("always", solver="cg", eps=1e-3, lr=1e-4)
    for index in range(12):
        run.train(index, 1)
        torch.cuda.synchronize()
    assert run.graphs > 0
    report = run.optimizer.report()
    assert 0 < report["iterations"] < 30
    assert report["relative_residual"] <= 1e-3


def test_learning_rates_change_between_replays():
    runs = both()
    change_learning_rates_between_replays(runs, 20)
    assert runs[0].graphs == 1
    assert_both_same(runs)


def test_learning_rates_in_tensors_are_read_again():
    runs = both()
    for each in runs:
        each.optimizer.param_groups[0]["lr"] = torch.tensor(0.05, device="cuda")
        for index in range(12):
            each.optimizer.param_groups[0]["lr"].mul_(0.9)
            each.train(index, 1)
    assert runs[0].graphs == 1
    assert_both_same(runs)


def with_groups(graphs: str) -> Run:
    run = Run(graphs)
    head, body = list(run.model[-1].parameters()), list(run.model[:-1].parameters())
    groups = [{"params": body}, {"params": head, "lr": 0.05}]
    run.optimizer = torchium.NaturalGradient(groups, lr=0.05, damping=0.5, graphs=graphs)
    return run


def test_groups_with_equal_and_other_learning_rates():
    runs = (with_groups("always"), with_groups("never"))
    for each in runs:
        each.train(0, 8)
        each.optimizer.param_groups[1]["lr"] = 0.01
        each.train(8, 8)
        each.optimizer.param_groups[0]["lr"] = 0.02
        each.train(16, 4)
    assert runs[0].graphs == 2
    assert_both_same(runs)


def replace_state(run: Run) -> None:
    for p in run.model.parameters():
        run.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


CHANGES: dict[str, Callable[[Run], None]] = {
    "freeze": freeze, "thaw": thaw, "reload": reload, "data": replace_data, "state": replace_state,
    "damping": set_option(damping=0.1), "momentum": set_option(momentum=0.2),
    "no momentum": set_option(momentum=0.0), "max_norm": set_option(max_norm=0.05),
    "explicit": set_option(solver="explicit"), "cg": set_option(solver="cg", eps=1e-3),
    "every 4": set_option(update_freq=4), "up": set_option(maximize=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("update_freq", [1, 3])
def test_changes_are_noticed(name, update_freq):
    runs = both(update_freq=update_freq)
    for each in runs:
        if name == "thaw":
            freeze(each)
        each.train(0, 9)
    assert runs[0].graphs > 0
    for each in runs:
        CHANGES[name](each)
        for index in range(9, 24):
            each.train(index, 1)
            torch.cuda.synchronize()
    assert runs[0].graphs > 0
    assert_both_same(runs)


def test_other_batch_sizes():
    runs = both()
    for each in runs:
        each.train(0, 6)
        each.train(6, 1, samples=7)  # the rest of an epoch
        each.train(7, 6)
        assert each.graphs == (each is runs[0])
        each.train(13, 6, samples=9)
    assert runs[0].graphs == 2
    assert_both_same(runs)


def test_a_kept_batch_of_another_size():
    runs = both(update_freq=4)
    for each in runs:
        each.train(0, 16)
        each.train(16, 4, samples=7)
        each.train(20, 16)
    assert runs[0].graphs > 0
    assert_both_same(runs)


def test_a_kept_batch_stays_the_same_tensors():
    run = Run("never", update_freq=3)
    run.train(0, 1)
    before = [v for s in run.optimizer.state.values() for k, v in s.items() if "." in k]
    run.train(1, 3)
    after = [v for s in run.optimizer.state.values() for k, v in s.items() if "." in k]
    assert len(before) == 6
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_two_micro_batches():
    runs = both("convnet")
    for each in runs:
        for index in range(8):
            each.optimizer.zero_grad()
            for half in range(2):
                x, y = each.batch(2 * index + half, 6)
                (F.cross_entropy(each.model(x), y) / 2).backward()
            each.optimizer.step()
    assert runs[0].graphs == 1
    assert_both_same(runs)


def test_output_gradients_that_overlap_and_inputs_with_gaps():
    """The gradient of a sum is one number at many places, and of a chunk of features other memory."""
    runs = both()
    for each in runs:
        for index in range(8):
            x, _ = each.batch(index, 12)
            each.optimizer.zero_grad()
            wide = torch.cat([x, x], 1)
            part = wide[:, 3:27] if index % 2 == 0 else wide[:, 4:28]
            (each.model(part).sum() / 12).backward()
            each.optimizer.step()
    assert runs[0].graphs == 2
    assert_both_same(runs)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_skips_replayed_steps(unscales):
    runs = both()
    for each in runs:
        scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=4)
        each.optimizer.grad_scaler = scaler if unscales else None
        for index in range(16):
            x, y = each.batch(index, 12)
            each.optimizer.zero_grad()
            scaler.scale(F.cross_entropy(each.model(x), y)).backward()
            if index == 9:
                next(each.model.parameters()).grad[0, 0] = float("inf")
            if unscales:
                scaler.unscale_(each.optimizer)
            scaler.step(each.optimizer)
            scaler.update()
            torch.cuda.synchronize()  # so that the next refresh follows the skip in both runs
    assert runs[0].graphs == 1
    assert_both_same(runs)
    step = next(iter(runs[0].optimizer.state.values()))["step"]
    assert step.item() == 15


def test_skipped_steps_are_reported():
    runs = both()
    for each in runs:
        each.train(0, 6)
        skip_a_step(each, 6, 2)
    assert_both_same(runs)
    run = runs[0]
    for index in range(3):
        run.backward(index)
        next(run.model.parameters()).grad.fill_(float("inf"))
        run.optimizer.step()
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        run.optimizer.check_errors()


def test_a_given_jacobian():
    runs = both()
    for each in runs:
        params = list(each.model.parameters())
        for index in range(7):
            generator = torch.Generator("cuda").manual_seed(index)
            rows = [torch.randn(9, *p.shape, device="cuda", generator=generator) for p in params]
            each.held += rows
            residuals = torch.randn(9, device="cuda", generator=generator)
            each.optimizer.update_jacobian(rows, residuals)
            each.optimizer.step()
    assert runs[0].graphs == 1
    assert_both_same(runs)


def test_damping_is_adapted_between_replays():
    runs = both(momentum=0.0, adaptive_damping=True)
    ratios: list[list[float]] = [[], []]
    for each, own in zip(runs, ratios, strict=True):
        for index in range(24):
            each.train(index, 1)
            if index % 6 == 5:
                own.append(each.optimizer.update_damping(1.0, 1.0 - 1e-3 * index))
    assert ratios[0] == ratios[1]
    assert runs[0].graphs == 1
    assert_both_same(runs)


def test_a_closure():
    runs = both()
    for each in runs:
        for index in range(6):
            each.optimizer.step(lambda each=each, index=index: each.backward(index))
    assert runs[0].graphs == 1
    assert_both_same(runs)


def test_a_capture_of_the_caller_is_refused():
    run = Run("always")
    run.train(0, 6)
    run.backward(6)
    with (
        pytest.raises(RuntimeError, match="cannot capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        run.optimizer.step()
    run.train(7, 3)
    run.optimizer.check_errors()


def test_another_stream():
    runs = both()
    stream = torch.cuda.Stream()
    for each in runs:
        each.train(0, 5)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            each.train(5, 5)
        torch.cuda.current_stream().wait_stream(stream)
        each.train(10, 3)
    assert runs[0].graphs == 1
    assert_both_same(runs)


def test_auto_leaves_a_large_jacobian_alone():
    """Its copy alone would take more than 1 % of the device."""
    total = torch.cuda.get_device_properties(0).total_memory
    model = nn.Linear(1000, 1000, bias=False).cuda()
    n = total // 100 // model.weight.nbytes + 2
    optimizer = torchium.NaturalGradient(model, solver="gram", graphs="auto")
    rows = [torch.ones(n, *model.weight.shape, device="cuda")]
    for _ in range(4):
        optimizer.update_jacobian(rows, torch.ones(n, device="cuda"))
        optimizer.step()
    assert optimizer._plan.core.graph_count() == 0
    assert optimizer.report()["graph_bytes"] == 0
