"""Functions of linear algebra and of per-sample gradients have the same options and defaults in both languages."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torchium import gradients, linalg

INCLUDE = Path(__file__).resolve().parents[3] / "include/torchium"
REQUIRED = inspect.Parameter.empty


def value_of(text: str | None, kind: str) -> Any:
    """A default value of C++; what is optional or an undefined tensor is None in Python."""
    if text is None:
        return None if kind.startswith("std::optional") or kind == "at::Tensor" else REQUIRED
    if text == "std::nullopt":
        return None
    if shifted := re.fullmatch(r"int64_t\{(\d+)\} << (\d+)", text):
        return int(shifted[1]) << int(shifted[2])
    return text.strip('"') if text.startswith('"') else float(text)


def declared(header: str) -> str:
    return re.sub(r"//.*", "", (INCLUDE / header).read_text())


def members(header: str, structure: str) -> dict[str, Any]:
    """The fields of a structure of options with their defaults."""
    body = declared(header).split(f"struct {structure} {{")[1].split("};")[0]
    fields = re.findall(r"([\w:]+(?:<[\w:]+>)?) (\w+)(?: = ([^;]+))?;", body)
    return {name: value_of(text or None, kind) for kind, name, text in fields}


def parameters(header: str, function: str) -> dict[str, Any]:
    """The parameters of the first overload but for structures of options."""
    body = re.search(rf"\b{function}\(([^;]*)\);", declared(header))[1]
    body = re.sub(r"std::function<[^;]*?>(?= |&)|\s+", " ", body)
    found = {}
    for parameter in re.split(r",(?![^<]*>)", body):
        text, _, default = parameter.partition(" = ")
        kind, name = text.replace("const ", "").replace("&", "").rsplit(" ", 1)
        if not kind.strip().endswith("Options"):
            found[name] = value_of(default or None, "" if default else "required")
    return found


def python_parameters(function: Any) -> dict[str, Any]:
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


# In Python: of a function in the place of an operator, or arguments that C++ has as other functions.
ONLY_IN_PYTHON = {
    "lanczos": {"n", "dtype", "device"},
    "arnoldi": {"n", "dtype", "device"},
    "matrix_inverse_root": {"return_info"},
}


@pytest.mark.parametrize(
    ("name", "header", "structure"),
    [
        ("lanczos", "krylov", "KrylovOptions"),
        ("arnoldi", "krylov", "KrylovOptions"),
        ("hutchinson_trace", "estimators", "HutchinsonOptions"),
        ("hutchinson_diagonal", "estimators", "HutchinsonOptions"),
        ("hutchpp", "estimators", None),
        ("xdiag", "estimators", None),
        ("logdet", "estimators", "LogdetOptions"),
        ("cg", "solvers", "SolverOptions"),
        ("gmres", "solvers", "SolverOptions"),
        ("matrix_inverse_root", "matrix_functions", "InverseRootOptions"),
        ("matrix_power", "matrix_functions", None),
        ("eigh", "matrix_functions", None),
        ("cholesky", "decompositions", None),
        ("spd_logdet", "decompositions", None),
        ("orthogonalize", "decompositions", None),
        ("polar", "decompositions", None),
        ("svd", "decompositions", None),
        ("kron", "products", None),
        ("kron_matmul", "products", None),
        ("kron_solve", "products", None),
        ("chunked_matmul", "products", None),
        ("spd_inverse", "products", None),
        ("spd_solve", "products", None),
        ("fused_mul_add", "products", None),
        ("fused_mul_add_", "products", None),
        ("hvp_operator", "hessian", None),
        ("fisher_operator", "fisher", None),
    ],
)
def test_linear_algebra(name, header, structure):
    expected = parameters(f"linalg/{header}.h", name)
    if structure:
        expected |= members(f"linalg/{header}.h", structure)
    if "which" in expected:  # empty in C++, which has one structure for both methods
        expected["which"] = {"lanczos": "LA", "arnoldi": "LM"}[name]
    found = python_parameters(getattr(linalg, name))
    extra = ONLY_IN_PYTHON.get(name, set())
    assert {k: v for k, v in found.items() if k not in extra} == expected
    assert extra <= set(found)


@pytest.mark.parametrize(
    "name", ["per_sample_gradients", "per_sample_norms", "gram", "jvp_dots", "clip_and_accumulate"]
)
def test_per_sample_gradients(name):
    expected = parameters("gradients.h", name)
    assert expected.pop("forward") is REQUIRED  # modules of C++ have no common call
    assert python_parameters(getattr(gradients, name)) == expected
