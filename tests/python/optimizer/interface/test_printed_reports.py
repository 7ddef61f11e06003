"""Reports are dicts that print as tables, the same in both languages."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
import torchium
from optimizer_cases import backward, ignore_fallback, mlp
from parity_tools import make
from torch import nn

pytestmark = ignore_fallback


def stepped(language: str, name: str, **options):
    model = mlp()
    optimizer = make(language, name, list(model.parameters()), **options)
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("cls", [torchium.KFAC, torchium.KFACPreconditioner])
def test_the_report_of_kfac_prints_a_line_for_each_parameter(cls):
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = cls(model)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    assert str(optimizer.report()).splitlines() == [
        "parameter  treatment  detail",
        "0.weight   factors    A 5, G 3",
        "0.bias     factors    A 5, G 3 of 0.weight",
        "1.weight   unit-wise  3 blocks 2 x 2",
        "1.bias     unit-wise  3 blocks 2 x 2 of 1.weight",
        "graphs                0 bytes",
    ]


def test_the_report_of_natural_gradient_prints_how_it_solved():
    assert str(torchium.NaturalGradient(mlp()).report()) == "no step yet"
    report = stepped("python", "NaturalGradient", solver="gram").report()
    lines = str(report).splitlines()
    assert [line.split() for line in lines] == [
        ["solver", "gram"],
        ["samples", str(report["samples"])],
        ["rows", str(report["rows"])],
        ["graphs", "0", "bytes"],
    ]
    lines = str(stepped("python", "NaturalGradient", solver="cg").report()).splitlines()
    assert [line.split("  ")[0] for line in lines[3:5]] == ["iterations", "relative residual"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("KFAC", {"max_factor_size": 4}),
        ("KFACPreconditioner", {}),
        ("NaturalGradient", {"solver": "gram"}),
        ("NaturalGradient", {"solver": "cg"}),
    ],
)
def test_both_languages_print_the_same(name, options):
    python, cpp = (stepped(language, name, **options) for language in ("python", "cpp"))
    assert str(python.report()) == cpp.report_table()


@pytest.mark.parametrize("name", ["KFAC", "NaturalGradient"])
def test_reports_are_dicts(name):
    report = stepped("python", name).report()
    assert isinstance(report, dict)
    plain = dict(report)
    assert report == plain
    assert repr(report) == repr(plain)
    assert json.loads(json.dumps(report)).keys() == plain.keys()
    for again in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert type(again) is type(report)
        assert again == report
        assert str(again) == str(report)
