"""Both languages have the same functions of memory and products, with the same defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import torchium
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
