"""Shampoo of a model: its groups, and the report of each parameter's rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchium
from optimizer_cases import set_gradients
from parity_tools import make
from torch import nn


class TiedModel(nn.Module):
    """Embeddings of two kinds, one of them tied to a head; a frozen layer; a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 6)
        self.bag = nn.EmbeddingBag(9, 6)
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 5, bias=False).requires_grad_(False)
        self.head = nn.Linear(6, 20, bias=False)
        self.head.weight = self.tokens.weight


@pytest.mark.parametrize("make_optimizer", [torchium.Shampoo, torchium.ShampooW])
def test_embeddings_are_a_group_of_their_own(make_optimizer):
    model = TiedModel()
    optimizer = make_optimizer(model, lr=0.5)
    others, embeddings = optimizer.param_groups
    assert embeddings["param_names"] == ["tokens.weight", "bag.weight"]
    assert embeddings["params"] == [model.tokens.weight, model.bag.weight]
    assert not embeddings["preconditioned"]
    assert others["preconditioned"]
    names = ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "frozen.weight"]
    assert others["param_names"] == names
    assert others["lr"] == embeddings["lr"] == 0.5


def test_a_model_without_embeddings_is_one_group():
    model = nn.Linear(3, 2)
    (group,) = torchium.Shampoo(model).param_groups
    assert group["param_names"] == ["weight", "bias"]
    (group,) = torchium.Shampoo(nn.Embedding(4, 3)).param_groups
    assert not group["preconditioned"]
    with pytest.raises(ValueError, match="empty"):
        torchium.Shampoo(nn.ReLU())


def test_trains_and_resumes_with_a_scheduler():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(24, 11))
    optimizer = torchium.ShampooW(model, lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    inputs = torch.randint(11, (32, 3))
    targets = inputs.sum(1) % 11

    def train(steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
        return loss.item()

    first = train(1)
    saved = optimizer.state_dict()
    optimizer = torchium.ShampooW(model, lr=0.02)
    optimizer.load_state_dict(saved)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    assert train(39) < 0.5 * first


def test_report():
    model = TiedModel()
    model.wide = nn.Linear(40, 7)
    optimizer = torchium.ShampooW(model, block_size=32, max_preconditioned_dim=41)
    planned = optimizer.report()
    set_gradients([p for p in model.parameters() if p.requires_grad], 0)
    optimizer.step()
    report = optimizer.report()
    assert report == planned
    rules = {p.name: (p.rule, p.detail) for p in report.parameters}
    assert rules == {
        "conv.weight": ("preconditioned", "1 block 3x18, exponent -0.5"),
        "conv.bias": ("diagonal", "order 0 or 1, takes the step of adam"),
        "norm.weight": ("diagonal", "order 0 or 1, takes the step of adam"),
        "norm.bias": ("diagonal", "order 0 or 1, takes the step of adam"),
        "frozen.weight": ("none", "requires no gradient"),
        "wide.weight": ("preconditioned", "1 block 7x32, 1 block 7x8, exponent -0.5"),
        "wide.bias": ("diagonal", "order 0 or 1, takes the step of adam"),
        "tokens.weight": ("adam", "preconditioned is off"),
        "bag.weight": ("adam", "preconditioned is off"),
    }
    for line in report.parameters:
        param = model.get_parameter(line.name)
        assert line.shape == param.shape
        assert line.state_bytes == sum(t.nbytes for t in optimizer.state[param].values())
        assert line.group == (1 if line.rule == "adam" else 0)
    total = sum(line.state_bytes for line in report.parameters)
    assert total == optimizer.memory_report().total.state.total


def test_report_names_the_limit_and_the_default_exponent():
    params = [nn.Parameter(torch.ones(9, 2)), nn.Parameter(torch.ones(4, 2))]
    for grafting, rule in ((None, "diagonal"), ("rmsprop", "rmsprop")):
        report = torchium.Shampoo(params, max_preconditioned_dim=8, grafting=grafting).report()
        long, short = report.parameters
        assert (long.rule, long.detail) == (rule, "dimension 9 above max_preconditioned_dim 8")
        assert short.detail == "1 block 4x2, exponent -1/4"
        assert long.name == "parameter 0 of group 0"


def test_table():
    optimizer = torchium.Shampoo([("a", nn.Parameter(torch.ones(20, 10)))])
    optimizer.add_param_group({"params": [("scale", nn.Parameter(torch.ones(())))]})
    lines = str(optimizer.report()).splitlines()
    assert lines[0].split() == ["parameter", "shape", "rule", "detail", "bytes", "of", "state"]
    assert lines[1].split(maxsplit=3)[:3] == ["a", "20x10", "preconditioned"]
    assert lines[2].split()[:3] == ["scale", "scalar", "diagonal"]
    assert lines[3].split() == ["total", f"{optimizer.memory_report().total.state.total:,}"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("grafting", [None, "adam"])
def test_both_languages_report_the_same(grafting):
    reports, tables = [], []
    for language in ("python", "cpp"):
        params: list[Any] = [
            nn.Parameter(torch.ones(s)) for s in ((9, 6), (7,), (3, 2, 3, 3), (), (30, 2), (0, 4))
        ]
        params.append(nn.Parameter(torch.ones(3), requires_grad=False))
        groups = [{"params": params[:2]}, {"params": params[2:], "preconditioned": True}]
        groups.append({"params": [nn.Parameter(torch.ones(4, 4))], "preconditioned": False})
        optimizer = make(
            language, "Shampoo", groups, block_size=4, grafting=grafting, max_preconditioned_dim=29
        )
        for _ in range(2):  # before the first step, and after it
            report = optimizer.report()
            if language == "python":
                report, table = [vars(p) for p in report.parameters], str(report)
            else:
                table = optimizer.report_table()
            reports.append(report)
            tables.append(table)
            set_gradients([p for p in params if p.requires_grad], 0)
            optimizer.step()
    assert reports == [reports[0]] * 4
    assert tables == [tables[0]] * 4
