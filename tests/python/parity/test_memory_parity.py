"""Both languages have the same functions of memory and products, with the same defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchium
from optimizer_cases import mlp
from parity_tools import make
from torchium import linalg
from torchium.utils.cuda_kernels import CUDAMemoryOps

INCLUDE = Path(__file__).resolve().parents[3] / "include/torchium"


def parameters(header: str, function: str) -> dict[str, bool]:
    """Name of a parameter -> whether its default is std::nullopt, which is None in Python."""
    text = (INCLUDE / header).read_text()
    (body,) = re.findall(rf"TORCHIUM_API [\w:<>& ]+? {function}\(([^;]*)\);", text)
    names = re.findall(r"(\w+)( = std::nullopt)?\s*(?:,|$)", re.sub(r"<[^>]*>", "", body))
    return {name: bool(default) for name, default in names}


def python_parameters(function) -> dict[str, bool]:
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default is None for p in found}


def test_functions_have_the_same_parameters_and_defaults():
    for name in ("memory_info", "workspace_report", "set_workspace_limit"):
        assert parameters("memory.h", name) == python_parameters(getattr(torchium, name)), name
    arena = CUDAMemoryOps.efficient_tensor_creation
    assert parameters("memory.h", "efficient_tensor_creation") == python_parameters(arena)
    assert parameters("memory.h", "release_arenas") == {}
    product = parameters("linalg/products.h", "chunked_matmul")
    assert product == python_parameters(linalg.chunked_matmul)
    assert product == {"A": False, "B": False, "max_workspace_bytes": True, "precision": True}


def members(structure: str) -> list[str]:
    text = (INCLUDE / "memory.h").read_text()
    body = text.split(f"struct {structure} {{")[1].split("};")[0]
    return re.findall(r"^  [\w:]+ (\w+)(?: = [^;]+)?;", body, re.MULTILINE)


def test_results_have_the_same_members():
    names = [f.name for f in dataclasses.fields(torchium.MemoryInfo)]
    assert names == ["device", *members("MemoryInfo")]
    assert [f.name for f in dataclasses.fields(torchium.WorkspaceUse)] == members("WorkspaceUse")


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Shampoo": ("Shampoo", {}),
    "Shampoo, all buffers": (
        "Shampoo", {"block_size": 4, "betas": (0.9, 0.99), "momentum": 0.5, "grafting": "adam"},
    ),
    "Adagrad": ("Adagrad", {}),
    "Adagrad, full": ("Adagrad", {"full_matrix": True, "block_size": 4}),
    "AdaHessian": ("AdaHessian", {}),
    "KFAC": ("KFAC", {}),
    "KFAC, inverse-free": ("KFAC", {"solver": "inverse_free"}),
    "KFACPreconditioner": ("KFACPreconditioner", {}),
    "NaturalGradient": ("NaturalGradient", {"update_freq": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_reports(name):
    pytest.importorskip("torchium_cpp._C", exc_type=ImportError)
    optimizer_name, options = OPTIMIZERS[name]
    reports = {}
    for language in ("python", "cpp"):
        model = mlp()
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters())}]
        optimizer = make(language, optimizer_name, groups, **options)
        taken = [as_dict(optimizer.memory_report())]
        inputs = torch.linspace(0, 1, 48).view(8, 6)
        model(inputs).square().mean().backward(create_graph=name == "AdaHessian")
        optimizer.step()
        model.zero_grad()
        reports[language] = [*taken, as_dict(optimizer.memory_report())]
    assert reports["python"] == reports["cpp"]
    assert reports["python"][1]["groups"][1]["counters"] > 0


def as_dict(report: Any) -> dict[str, Any]:
    if isinstance(report, dict):
        return report
    return {
        "groups": [numbers_of(group) for group in report.groups],
        "joint": numbers_of(report.joint),
        "parameters": [(p.name, p.group, vars(p.state)) for p in report.parameters],
        "table": str(report),
    }


def numbers_of(group: torchium.optimizers.GroupMemory) -> dict[str, int]:
    return {**{k: v for k, v in vars(group).items() if k != "state"}, **vars(group.state)}
