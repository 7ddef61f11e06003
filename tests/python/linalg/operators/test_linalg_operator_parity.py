"""Both languages have the same operators, functions and defaults: the Python classes hold C++ ones."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch
from torchium import linalg

INCLUDE = Path(__file__).resolve().parents[4] / "include/torchium/linalg"


def header(name: str) -> str:
    return (INCLUDE / f"{name}.h").read_text()


def test_the_classes_are_the_same():
    declared = re.findall(
        r"struct TORCHIUM_API (\w+) : LinearOperator", header("structured_operators")
    )
    assert len(declared) == 12
    for name in declared:
        assert issubclass(getattr(linalg, name), linalg.LinearOperator)
    public = {
        name
        for name, value in vars(linalg).items()
        if inspect.isclass(value) and issubclass(value, linalg.LinearOperator)
    }
    assert public == {*declared, "LinearOperator"}


def test_the_functions_are_the_same():
    body = header("linear_operator").split("class TORCHIUM_API LinearOperator")[1]
    body = body.split(" private:")[0]
    methods = set(re.findall(r"^  [\w:<>&, ]+ (\w+)\([^;]*?\) const;", body, re.MULTILINE))
    named_otherwise = {"size", "sizes", "options", "matmul", "rmatmul", "plus", "scaled"}
    python = {name for name in vars(linalg.LinearOperator) if not name.startswith("_")}
    assert methods - named_otherwise == python - {"T", "shape", "dtype", "device"}


def test_the_defaults_are_the_same():
    most = re.findall(
        r"int64_t max_iterations = (\d+);", header("solvers") + header("linear_operator")
    )
    functions = [linalg.cg, linalg.gmres]
    functions += [
        getattr(linalg.LinearOperator, n) for n in ["inverse", "solve", "exp", "sqrt", "pow"]
    ]
    for function in functions:
        parameters = inspect.signature(function).parameters
        assert {str(parameters["max_iterations"].default)} == set(most)
        assert parameters["tol"].default is None
    (restart,) = re.findall(r"int64_t restart = (\d+)", header("solvers"))
    assert inspect.signature(linalg.gmres).parameters["restart"].default == int(restart)
    for name in ["diag", "trace", "slogdet", "logdet", "det"]:
        parameters = inspect.signature(getattr(linalg.LinearOperator, name)).parameters
        assert parameters["num_samples"].default is None
        assert parameters["seed"].default == 0
    assert inspect.signature(linalg.LinearOperator.eigs).parameters["which"].default == "LM"
    optional = r"std::optional<int64_t> (\w+) = std::nullopt,"
    assert re.findall(optional, header("krylov")) == ["k", "k"]
    assert re.findall(optional, header("estimators")) == ["num_products"]
    for function, name in [
        (linalg.lanczos, "k"),
        (linalg.arnoldi, "k"),
        (linalg.xdiag, "num_products"),
    ]:
        assert inspect.signature(function).parameters[name].default is None


def test_every_structure_of_results_has_its_class():
    """What C++ calls a result, Python finds the class of."""
    A = torch.eye(2)
    for made in [linalg.Dense(A), linalg.Diagonal(A[0]), linalg.Kronecker(A, A), linalg.Sum(A, A)]:
        assert made.kind == type(made).__name__ == type(made.T).__name__
