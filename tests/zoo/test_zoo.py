"""Every kind of model is trained by every optimizer; or natural gradient names a layer it refuses.

Every model takes half of the settings of every optimizer, in turn, for 20 or 30 steps. On a machine with a GPU, and with
``TORCHIUM_ZOO=whole``, which takes the models at their whole size, it takes all, for 40 steps.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward_data
import language_models
import pytest
import sequence_models
import special_losses
import torch
import training_styles
import vision_models
from optimizer_settings import REFUSING, SETTINGS, half_of_the_settings
from task import Size, Task
from torch import Tensor, nn

SIZE = Size(whole=os.environ.get("TORCHIUM_ZOO") == "whole")
FAMILIES = (
    awkward_data,
    sequence_models,
    vision_models,
    language_models,
    special_losses,
    training_styles,
)
KINDS = {name: build for family in FAMILIES for name, build in family.KINDS.items()}
ALL_SETTINGS = SIZE.whole or torch.cuda.is_available()
# A model that learns slowly needs the more steps.
SLOW = {
    "adversaries",
    "bert",
    "click_rate",
    "dense_graph",
    "embedding",
    "experts",
    "inputs_1e_9",
    "lora",
    "lora_parametrized",
    "lstm",
    "one_hot",
    "physics",
    "sparse_graph",
    "tied_embedding",
}
RUNS = [
    (kind, setting)
    for turn, kind in enumerate(KINDS)
    for setting in (SETTINGS if ALL_SETTINGS else half_of_the_settings(turn))
]
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "choosing_and_tuning.md"
REFUSED_HEADING = "Layers that natural gradient refuses"

# K-FAC lists the layers that take plain steps.
pytestmark = pytest.mark.filterwarnings("ignore:KFAC")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are slower with more of them."""
    threads = torch.get_num_threads()
    if not SIZE.whole:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def documented_refusals() -> list[str]:
    """The texts that begin the bullets of the guide's list."""
    _, _, rest = GUIDE.read_text().partition(f"# {REFUSED_HEADING}\n")
    section = re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^[-*] `([^`]+)`", section, flags=re.MULTILINE)


def is_documented(refusal: ValueError, model: nn.Module) -> bool:
    """Whether the refusal names a part of the model and holds a text of the guide's list.

    A layer of torch.nn has to be in the list by its type: "is of an unsupported type" is not enough.
    """
    message = str(refusal)
    quoted = set(re.findall(r"'([^']+)'", message))
    names = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
    classes = {type(m).__name__: type(m) for m in model.modules()}
    named = [classes[word] for word in re.findall(r"\w+", message) if word in classes]
    assert quoted & names or named, f"no layer is named: {message}"
    is_stock = any(cls.__module__.startswith("torch.nn.modules") for cls in named)
    return any(
        text in message
        for text in documented_refusals()
        if not (is_stock and text == "is of an unsupported type")
    )


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def steps_of(kind: str) -> int:
    return 40 if ALL_SETTINGS else 30 if kind in SLOW else 20


def built(kind: str, device: torch.device) -> Task:
    torch.manual_seed(0)
    return KINDS[kind](SIZE).to(device)


@pytest.mark.parametrize(("kind", "setting"), RUNS)
def test_zoo(kind: str, setting: str, device: torch.device) -> None:
    with torch.random.fork_rng():
        task = built(kind, device)
        before = [p.detach().clone() for p in task.model.parameters()]
        first = task.measured()
        try:
            optimizers, last = task.train(SETTINGS[setting], steps_of(kind))
        except ValueError as error:
            if setting not in REFUSING or not is_documented(error, task.model):
                raise
            for parameter, value in zip(task.model.parameters(), before, strict=True):
                assert torch.equal(parameter, value)
            pytest.skip(str(error).partition(";")[0])

    for name, parameter in task.model.named_parameters():
        assert parameter.isfinite().all(), name
    for optimizer in optimizers:
        optimizer.check_errors()
        state = optimizer.state_dict()["state"]
        assert state
        for values in state.values():
            for key, value in values.items():
                assert all(tensor.isfinite().all() for tensor in tensors(value)), key
    assert math.isfinite(first)
    assert last < (1 - task.fall) * first, f"{first:.4f} -> {last:.4f}"
