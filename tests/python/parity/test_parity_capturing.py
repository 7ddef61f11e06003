"""The C++ and Python K-FAC and natural gradient are identical, bitwise on the CPU.

The C++ optimizers watch libtorch's operators, which a Python model calls too. Both run the same forward pass,
so only the optimizers can differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_layers import Conv1D
from parity_tools import assert_same, make, set_lr, state_of
from torch import Tensor, nn

pytest.importorskip("torchium_cpp._C", exc_type=ImportError)

LANGUAGES = ("python", "cpp")
STEPS = 12
BATCH = 8


def steps_of(options: dict[str, Any]) -> range:
    """Two updates, at least, of all that is due every few steps: the defaults' inverses at every tenth."""
    return range(5 if options else STEPS)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Words(nn.Module):
    """An embedding, a norm and a layer called twice, on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=0)
        self.twice = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, indices: Tensor) -> Tensor:
        x = torch.tanh(self.twice(self.embedding(indices)))
        return self.head(self.norm(self.twice(x))).mean(1)


class TiedWords(nn.Module):
    """An embedding whose weight is that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=0)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.embedding(indices))) + self.embedding(indices[:, :1])
        return self.head(x).mean(1)


class Positions(nn.Module):
    """Tables of words, of one word for each sample, and of positions that samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kind = nn.Embedding(6, 4), nn.Embedding(3, 4, padding_idx=1)
        self.positions, self.head = nn.Embedding(3, 4), nn.Linear(4, 3)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.words(indices) + self.kind(indices[:, 0] % 3)[:, None]
        return self.head(torch.tanh(x + self.positions(torch.arange(3))[None])).mean(1)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, (2, 3), stride=2, padding=(0, 1), dilation=(2, 1), bias=False), nn.Tanh(),
        nn.Flatten(), nn.Linear(18, 3),
    )  # fmt: skip


def sequence_mlp() -> nn.Module:
    """In-place activations of three-dimensional outputs, which are views."""
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3), nn.Flatten(), nn.Linear(12, 3)
    )


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(5), Conv1D(7, 5), Conv1D(3, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.norm(x)))).mean(1)


def signals() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 4, padding="same"), nn.ReLU(inplace=True),
        nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular", groups=2), nn.RMSNorm(6), nn.Tanh(),
        nn.ConvTranspose1d(4, 2, 3, stride=2, output_padding=1), nn.Flatten(), nn.Linear(28, 3),
    )  # fmt: skip


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 2, stride=(1, 2, 1), dilation=(2, 1, 1), groups=2), nn.Tanh(),
        nn.ConvTranspose3d(4, 2, 2, padding=(0, 1, 0)), nn.Flatten(), nn.Linear(18, 3),
    )  # fmt: skip


def decoder() -> nn.Module:
    """As that of DCGAN: from a code to three images, of which the classes are the means."""
    return nn.Sequential(
        nn.Linear(5, 8), nn.Unflatten(1, (4, 1, 2)),
        nn.ConvTranspose2d(4, 4, (3, 2), stride=2, padding=(1, 0), output_padding=1, groups=2),
        nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )  # fmt: skip


def batch_norms() -> nn.Module:
    """With the statistics of the batch, and with running ones."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3),
    )  # fmt: skip
    model[5].eval()
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda seed: torch.randn(BATCH, 5, generator=generator(seed))),
    "convnet": (convnet, lambda seed: torch.randn(BATCH, 2, 6, 6, generator=generator(seed))),
    "signals": (signals, lambda seed: torch.randn(BATCH, 2, 6, generator=generator(seed))),
    "decoder": (decoder, lambda seed: torch.randn(BATCH, 5, generator=generator(seed))),
    "volumes": (volumes, lambda seed: torch.randn(BATCH, 2, 4, 4, 3, generator=generator(seed))),
    "words": (Words, lambda seed: torch.randint(6, (BATCH, 3), generator=generator(seed))),
    "positions": (Positions, lambda seed: torch.randint(6, (BATCH, 3), generator=generator(seed))),
    "tied_words": (
        TiedWords,
        lambda seed: torch.randint(6, (BATCH, 3), generator=generator(seed)),
    ),
    "transposed": (Transposed, lambda seed: torch.randn(BATCH, 4, 5, generator=generator(seed))),
    "batch_norms": (
        batch_norms,
        lambda seed: torch.randn(BATCH, 2, 4, 4, generator=generator(seed)),
    ),
    "sequence": (sequence_mlp, lambda seed: torch.randn(BATCH, 4, 5, generator=generator(seed))),
}

KFAC: dict[str, dict[str, Any]] = {
    "defaults": {},
    "pi": dict(TCov=2, TInv=3),
    "plain": dict(TCov=2, TInv=3, damping_split="plain"),
    "newton": dict(TCov=2, TInv=3, solver="newton"),
    "cholesky": dict(TCov=2, TInv=3, solver="cholesky"),
    "exact": dict(TCov=2, TInv=3, damping_split="exact"),
    "every_step": dict(TCov=1, TInv=1, momentum=0.0, kl_clip=None, lr=0.01),
    "weight_decay": dict(TCov=3, TInv=4, weight_decay=0.1, maximize=True),
    "diagonals": dict(TCov=2, TInv=3, max_factor_size=5),
    "exact_diagonals": dict(TCov=2, TInv=3, max_factor_size=6, damping_split="exact"),
    "reduce": dict(TCov=2, TInv=3, weight_sharing="reduce"),
    "bfloat16_factors": dict(TCov=2, TInv=3, factor_dtype="bfloat16"),
    "ekfac": dict(TCov=2, TInv=3, damping_split="exact", ekfac=True),
    "ekfac_ggn": dict(TCov=1, TInv=3, damping_split="exact", ekfac=True, fisher="ggn"),
    "ekfac_diagonals": dict(TCov=1, TInv=3, damping_split="exact", ekfac=True, max_factor_size=6),
    "ggn": dict(TCov=2, TInv=3, fisher="ggn"),
    "inverse_free": dict(TCov=2, solver="inverse_free"),
    "inverse_free_blocks": dict(
        TCov=1,
        solver="inverse_free",
        structures=("block_diagonal", "toeplitz"),
        block_size=3,
        weight_sharing="reduce",
        alpha1=0.0,
        stat_decay=0.5,
    ),
    "inverse_free_toeplitz": dict(
        TCov=1,
        solver="inverse_free",
        structures=("toeplitz", "block_diagonal"),
        block_size=2,
        fisher="ggn",
        damping=0.1,
    ),
    "inverse_free_bfloat16": dict(
        TCov=2,
        solver="inverse_free",
        structures=("diagonal", "dense"),
        max_factor_size=5,
        factor_dtype="bfloat16",
        stat_decay=0.5,
    ),
    "mc": dict(TCov=2, TInv=3, fisher="mc", weight_sharing="reduce", damping_split="exact"),
    "sum_of_losses": dict(TCov=2, TInv=2, batch_averaged=False, stat_decay=0.5, damping=0.1),
}
NATURAL_GRADIENT: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gram": dict(solver="gram", damping=0.1),
    "cg": dict(solver="cg", damping=0.1, eps=1e-5),
    "momentum": dict(momentum=0.9, damping=0.1),
    "cg_momentum": dict(solver="cg", momentum=0.5, damping=0.1),
    "update_freq": dict(update_freq=3, damping=0.5),
    "update_freq_momentum": dict(update_freq=4, momentum=0.5, damping=0.5, max_norm=0.5),
    "cg_update_freq": dict(solver="cg", update_freq=3, damping=0.5),
    "max_norm": dict(max_norm=0.05, maximize=True),
    "explicit": dict(solver="explicit", damping=0.1, max_workspace_bytes=2**14),
    "nystrom": dict(solver="cg", damping=0.1, nystrom_rank=5, update_freq=2),
    "ggn": dict(fisher="ggn", damping=0.1),
    "ggn_cg": dict(fisher="ggn", damping=0.1, solver="cg", momentum=0.0),
    "mc": dict(fisher="mc", damping=0.1, solver="explicit", update_freq=3),
}
CASES = [("KFAC", options) for options in KFAC.values()] + [
    ("NaturalGradient", options) for options in NATURAL_GRADIENT.values()
]
CASE_IDS = [f"kfac_{case}" for case in KFAC] + [f"natural_{case}" for case in NATURAL_GRADIENT]
cases = pytest.mark.parametrize(("name", "options"), CASES, ids=CASE_IDS)

pytestmark = pytest.mark.filterwarnings("ignore:KFAC")


class Run:
    """A model and its optimizer, in one language."""

    def __init__(self, language: str, name: str, model: str, groups: Any = None, **options: Any):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = MODELS[model][0]()
        self.batch = MODELS[model][1]
        self.params = list(self.model.parameters())
        self.make = lambda: make(
            language,
            name,
            groups(self.params) if groups else self.params,
            **{"lr": 0.05, **options},
        )
        self.optimizer = self.make()
        self.has_curvature = options.get("fisher", "empirical") != "empirical"
        self.sign = -1.0 if options.get("maximize") else 1.0
        self.history: list[list[Tensor]] = []

    def loss(self, seed: int, part: slice = slice(None)) -> Tensor:
        targets = torch.randint(3, (BATCH,), generator=generator(seed))
        outputs = self.model(self.batch(seed)[part])
        if self.has_curvature:
            self.optimizer.update_curvature(
                outputs, "cross_entropy", samples=2, generator=generator(seed)
            )
        return self.sign * nn.functional.cross_entropy(outputs, targets[part])

    def step(self, seed: int) -> None:
        self.optimizer.zero_grad()
        self.loss(seed).backward()
        self.optimizer.step()
        self.record()

    def record(self) -> None:
        self.history.append([p.detach().clone() for p in self.params])

    def states(self) -> list[dict[str, Tensor]]:
        return [state_of(self.optimizer, p) for p in self.params]


def assert_twins(python: Run, cpp: Run) -> None:
    for step, (a, b) in enumerate(zip(python.history, cpp.history, strict=True)):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True)), f"step {step}"
    assert all(p.isfinite().all() for p in python.params)
    assert not torch.equal(python.history[0][0], python.history[-1][0])
    assert [sorted(s) for s in python.states()] == [sorted(s) for s in cpp.states()]
    assert_same(python.states(), cpp.states())
    assert without_reasons(python.optimizer.report()) == without_reasons(cpp.optimizer.report())


def without_reasons(report: Any) -> dict[str, Any]:
    """Python knows the modules of parameters that fall back, C++ the operators."""
    parameters = report.get("parameters", {})
    return {
        **report,
        "parameters": {
            name: (treatment, "" if treatment == "fallback" else detail)
            for name, (treatment, detail) in parameters.items()
        },
    }


def twins(name: str, model: str, **options: Any) -> tuple[Run, Run]:
    python, cpp = (Run(language, name, model, **options) for language in LANGUAGES)
    return python, cpp


# Natural gradient refuses rows that samples share, and statistics of a batch.
REFUSED = [("NaturalGradient", "positions"), ("NaturalGradient", "batch_norms")]
# Each case with a third of the models, in turn: options are the core's, which both languages share.
CASES_OF_MODELS = [
    pytest.param(name, options, model, id=f"{case_id}-{model}")
    for i, ((name, options), case_id) in enumerate(zip(CASES, CASE_IDS, strict=True))
    for j, model in enumerate(MODELS)
    if (i + j) % 3 == 0 and (name, model) not in REFUSED
]


@pytest.mark.parametrize(("name", "options", "model"), CASES_OF_MODELS)
def test_trajectory_and_state(name, options, model):
    python, cpp = twins(name, model, **options)
    for run in (python, cpp):
        for step in steps_of(options):
            run.step(step)
    assert_twins(python, cpp)


@pytest.mark.parametrize("name", ["KFAC", "NaturalGradient"])
def test_groups_and_schedules(name):
    options = [{"damping": 0.2, "momentum": 0.5}, {"lr": 0.0}, {"damping": 0.5}]

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        parts = (params[:1], params[1:3], params[3:5])  # the last bias starts later
        return [{"params": part, **more} for part, more in zip(parts, options, strict=True)]

    python, cpp = twins(name, "mlp", groups=groups, damping=0.1)
    for run in (python, cpp):
        for step in range(STEPS):
            if step == 5:
                run.optimizer.add_param_group({"params": run.params[5:]})
            if step > 5:
                set_lr(run.optimizer, 0.1 / step)
            run.step(step)
    assert_twins(python, cpp)


@pytest.mark.parametrize("frozen", ["twice.weight", "twice.bias", "norm.weight", "norm.bias"])
@pytest.mark.parametrize("name", ["KFAC", "KFACPreconditioner"])
def test_parameters_that_are_frozen_and_thawed(name, frozen):
    options = {"KFAC": dict(TCov=1, TInv=2), "KFACPreconditioner": dict(factor_update_steps=1)}
    python, cpp = twins(name, "words", **options[name])
    for run in (python, cpp):
        sgd = torch.optim.SGD(run.params, lr=0.05) if name == "KFACPreconditioner" else None
        for step in range(STEPS):
            run.model.get_parameter(frozen).requires_grad_(step not in range(4, 8))
            run.step(step)
            if sgd is not None:
                sgd.step()
    assert_twins(python, cpp)
    assert python.optimizer.report()["fallback"] == []


@cases
def test_micro_batches_and_other_passes(name, options):
    python, cpp = twins(name, "convnet", **options)
    for run in (python, cpp):
        for step in steps_of(options):
            run.model(run.batch(50 + step))  # no backward pass
            x = run.batch(60 + step).requires_grad_()
            torch.autograd.grad(run.model(x).sum(), x)
            run.loss(70 + step).backward()
            run.optimizer.zero_grad()
            for part in (slice(0, 4), slice(4, 8)):
                (run.loss(step, part) / 2).backward()
            run.optimizer.step()
            run.record()
    assert_twins(python, cpp)


@pytest.mark.parametrize("options", KFAC.values(), ids=KFAC)
def test_micro_batches_of_a_tied_head(options):
    python, cpp = twins("KFAC", "tied_words", **options)
    for run in (python, cpp):
        for step in steps_of(options):
            run.loss(70 + step).backward()
            for p in run.params:  # not by the optimizer, which learns of it only from the next pass
                p.grad = None
            for part in (slice(0, 4), slice(4, 8)):
                (run.loss(step, part) / 2).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.record()
    assert_twins(python, cpp)
    assert "embedding.weight" not in " ".join(python.optimizer.report()["fallback"])


@cases
def test_skipped_steps(name, options):
    python, cpp = twins(name, "mlp", **options)
    for run in (python, cpp):
        for step in steps_of(options):
            if step % 3 == 1:
                run.optimizer.zero_grad()
                (run.loss(step) * math.nan).backward()
                run.optimizer.step()
            run.step(step)
    assert_twins(python, cpp)


@cases
def test_a_cpp_archive_goes_on_like_an_uninterrupted_python_run(name, options):
    model = ("convnet", "tied_words")[CASES.index((name, options)) % 2]
    python = Run("python", name, model, **options)
    for step in steps_of(options):
        python.step(step)
    cpp = Run("cpp", name, model, **options)
    for step in steps_of(options):
        if step in (1, 3, 4):
            archive = cpp.optimizer.save_bytes()
            cpp.optimizer = cpp.make()
            cpp.optimizer.load_bytes(archive)
        cpp.step(step)
    assert_twins(python, cpp)


SCHEDULES: dict[str, Callable[[int], Any]] = {
    "damping": lambda step: 0.3 / step,
    "stat_decay": lambda step: 1.0 - 0.5 / step,
    "TCov": lambda step: 1 if step < 4 else 3,
    "TInv": lambda step: 2 + step // 4,
    "kl_clip": lambda step: None if step % 2 else 0.01,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_functions_of_the_step(name):
    python, cpp = twins("KFAC", "convnet", **{name: SCHEDULES[name]})
    for run in (python, cpp):
        for step in range(STEPS):
            run.step(step)
    assert_twins(python, cpp)


def test_errors_of_functions_of_the_step():
    messages = []
    for language in LANGUAGES:
        with pytest.raises(ValueError, match="which its function returned") as error:
            Run(language, "KFAC", "mlp", damping=lambda step: -float(step))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


ADAPTIVE: list[tuple[str, dict[str, Any]]] = [
    *(("KFAC", dict(TCov=1, TInv=2, damping_split=split)) for split in ("pi", "plain", "exact")),
    *(("NaturalGradient", dict(solver=solver)) for solver in ("gram", "explicit", "cg")),
    ("NaturalGradient", dict(fisher="ggn", update_freq=2)),
]


@pytest.mark.parametrize(("name", "options"), ADAPTIVE)
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_adaptive_damping(model, name, options):
    options = dict(lr=0.5, momentum=0.0, damping=0.01, adaptive_damping=True, **options)
    python, cpp = twins(name, model, **options)
    ratios: list[list[float]] = [[], []]
    for run, found in zip((python, cpp), ratios, strict=True):
        for step in range(STEPS):
            before = run.loss(step).item()
            run.step(step)
            if step % 3 == 2:
                after = run.loss(step).item()
                found.append(run.optimizer.update_damping(before, after))
    assert_twins(python, cpp)
    assert ratios[0] == ratios[1]
    damping = python.optimizer.param_groups[0]["damping"]
    assert damping == cpp.optimizer.options()["damping"] != 0.01


@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
def test_jacobians_from_the_caller(solver):
    python, cpp = twins("NaturalGradient", "mlp", solver=solver, damping=0.1)
    for run in (python, cpp):
        for step in range(STEPS):
            rows = [
                torch.randn(BATCH, *p.shape, generator=generator(step + 20 * i))
                for i, p in enumerate(run.params)
            ]
            residuals = torch.randn(BATCH, generator=generator(step))
            run.optimizer.update_jacobian(rows, residuals)
            run.optimizer.step()
            run.record()
    assert_twins(python, cpp)


def test_errors_of_jacobians_from_the_caller():
    messages = []
    for run in twins("NaturalGradient", "mlp"):
        rows = [torch.ones(BATCH, *p.shape) for p in run.params]
        for change in (lambda J: (J[1:], torch.ones(BATCH)), lambda J: (J, torch.ones(3))):
            with pytest.raises(ValueError, match="must be") as error:
                run.optimizer.update_jacobian(*change(rows))
            messages.append(str(error.value))
    assert messages[:2] == messages[2:]


PRECONDITIONER: dict[str, dict[str, Any]] = {
    "defaults": {},
    "pi": dict(factor_update_steps=2, inv_update_steps=3, factor_decay=0.5),
    "exact": dict(factor_update_steps=2, inv_update_steps=3, damping_split="exact"),
    "every_step": dict(factor_update_steps=1, inv_update_steps=1, kl_clip=None, damping=0.1),
    "diagonals": dict(max_factor_size=5, weight_sharing="reduce", batch_averaged=False),
}


@pytest.mark.parametrize(
    ("case", "model"),
    [
        (case, model)
        for i, case in enumerate(PRECONDITIONER)
        for j, model in enumerate(MODELS)
        if (i + j) % 2 == 0
    ],
)
def test_preconditioned_gradients(case, model):
    options = PRECONDITIONER[case]
    python, cpp = twins("KFACPreconditioner", model, **options)
    for run in (python, cpp):
        sgd = torch.optim.SGD(run.params, lr=0.05, momentum=0.9)
        for step in steps_of(options):
            run.step(step)
            sgd.step()
    assert_twins(python, cpp)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["KFAC", "NaturalGradient"])
def test_other_dtypes(name, dtype):
    def convert(run: Run) -> Run:
        batch = run.batch
        run.model.to(dtype)
        run.batch = lambda seed: batch(seed).to(dtype)
        return run

    python, cpp = map(convert, twins(name, "mlp", damping=0.1))
    for run in (python, cpp):
        for step in range(STEPS):
            run.step(step)
    assert_twins(python, cpp)
