"""torchium.linalg raises errors for wrong argument types, with name, value and remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchium import linalg

I = torch.eye(3)  # noqa: E741
BIG = torch.ones(30, 30)
CONVERT = r"torch\.as_tensor converts"

ONE_STACK = {
    "kron": (I, I),
    "kron_matmul": (I, I, torch.ones(9, 1)),
    "kron_solve": (I, I, torch.ones(9, 1), 0.1),
    "chunked_matmul": (I, I),
    "spd_inverse": (I,),
    "spd_solve": (I, torch.ones(3, 1)),
    "cholesky": (I,),
    "spd_logdet": (I,),
    "orthogonalize": (I,),
    "polar": (I,),
    "svd": (I,),
    "fused_mul_add": (I, I, I),
}
BATCHES = {"matrix_inverse_root": (I, 2), "matrix_power": (I, 0.5), "eigh": (I,)}
NAMES = {"fused_mul_add": "abc"}


def refuses(message: str, function: str, *arguments, **options) -> None:
    with pytest.raises(ValueError, match=rf"^{function}: {message}"):
        getattr(linalg, function)(*arguments, **options)


@pytest.mark.parametrize("value", [[[1.0, 0.0], [0.0, 1.0]], np.eye(3), 3, None])
@pytest.mark.parametrize("function", ONE_STACK)
def test_every_operand_must_be_a_tensor(function, value):
    for index, operand in enumerate(ONE_STACK[function]):
        if isinstance(operand, torch.Tensor):
            arguments = list(ONE_STACK[function])
            arguments[index] = value
            name = NAMES.get(function, "AX" if function == "spd_solve" else "ABX")[index]
            kind = {"ndarray": r"numpy\.ndarray"}.get(type(value).__name__, type(value).__name__)
            refuses(
                rf"{name} is .* \({kind}\); it must be a tensor\. {CONVERT}", function, *arguments
            )


@pytest.mark.parametrize("function", ONE_STACK)
def test_a_list_of_tensors_names_the_way_out(function):
    arguments = ([I, I], *ONE_STACK[function][1:])
    refuses(r". is \[.*torch\.stack", function, *arguments)


@pytest.mark.parametrize("function", BATCHES)
def test_matrices_must_be_tensors_or_lists_of_tensors(function):
    others = BATCHES[function][1:]
    either = "it must be a tensor, or a list or tuple of tensors"
    refuses(rf"A is array.*{either}\. {CONVERT}", function, np.eye(3), *others)
    refuses(rf"A is 3 \(int\); {either}", function, 3, *others)
    refuses(
        rf"A\[1\] is 2\.5 \(float\); it must be a tensor\. {CONVERT}", function, [I, 2.5], *others
    )
    refuses(r"A\[0\] is \[1\.0, 0\.0\]", function, [[1.0, 0.0], [0.0, 1.0]], *others)


@pytest.mark.parametrize("root", [2.5, 2.0, True, None, "2", 2**63, torch.tensor(2.5)])
@pytest.mark.parametrize("return_info", [False, True])
def test_root_must_be_an_integer(root, return_info):
    refuses(
        r"root is .*; it must be a positive integer below 2\*\*63\. For .* use matrix_power\.",
        "matrix_inverse_root",
        I,
        root,
        return_info=return_info,
    )


def test_integers_of_numpy_are_integers():
    assert torch.equal(linalg.matrix_inverse_root(I, np.int64(2)), I)


@pytest.mark.parametrize("value", ["x", None, [0.1], 1j])
def test_numbers_must_be_numbers(value):
    message = r" is .*; it must be a number\."
    for name in ("eps", "relative_eps"):
        refuses(name + message, "matrix_inverse_root", I, 2, **{name: value})
        refuses(name + message, "matrix_power", I, 2, **{name: value})
    refuses("exponent" + message, "matrix_power", I, value)
    refuses("damping" + message, "kron_solve", I, I, torch.ones(9, 1), value)
    refuses("damping" + message, "spd_inverse", I, damping=value)
    refuses("damping" + message, "spd_solve", I, I, damping=value)


def test_method_and_workspace():
    refuses(r"method is 3 \(int\); it must be 'auto'", "matrix_inverse_root", I, 2, method=3)
    message = r"max_workspace_bytes is 1\.5 \(float\); it must be an integer below 2\*\*63, or None"
    refuses(message, "chunked_matmul", I, I, max_workspace_bytes=1.5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_checks_leave_one_compiled_graph(dynamic):
    def function(A, root, eps, workspace):
        X = linalg.matrix_inverse_root([A, A[:2, :2]], root, eps=eps)
        Y = linalg.matrix_power(A, 1.0 / root, relative_eps=eps)
        Z = linalg.chunked_matmul(X[0], Y, max_workspace_bytes=workspace)
        return linalg.spd_inverse(Z, damping=eps) + linalg.matrix_inverse_root(A, A.shape[0])

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    A = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    for arguments in ((A, 2, 0.1, 4096), (A, 4, 0.2, None)):
        torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_proxies_of_fx_are_tensors():
    graph = torch.fx.symbolic_trace(lambda A: linalg.matrix_power(linalg.kron(A, A), 0.5))
    torch.testing.assert_close(graph(I), torch.eye(9))


@pytest.mark.parametrize("value", [1.5, "x", None, True, 2**63])
def test_numbers_of_products_and_seeds_must_be_integers(value):
    remedy = r" is .*; it must be an integer below 2\*\*63\."
    for function in ("hutchinson_trace", "hutchinson_diagonal", "logdet"):
        for name in ("num_samples", "seed"):
            refuses(name + remedy, function, I, **{name: value})
    refuses("block_size" + remedy, "logdet", I, block_size=value)
    for function in ("hutchpp", "xdiag"):
        for name in ("num_products", "seed"):
            if (function, name, value) == ("xdiag", "num_products", None):
                continue
            refuses(name + remedy, function, I, **{name: value})
    refuses("num_steps" + remedy, "logdet", I, num_steps=value)
    if value is not None:
        for function in ("hutchinson_trace", "hutchinson_diagonal"):
            refuses("block_size is .*; it must be a positive", function, I, block_size=value)
    for function in ("lanczos", "arnoldi"):
        refuses("seed" + remedy, function, I, 1, seed=value)
        if value is not None:
            refuses(r"k is .*; it must be from 1 to n\.", function, I, value)
        refuses("max_restarts is .*; it must be an integer", function, I, 1, max_restarts=value)
        if value is not None:
            refuses("block_size is .*; it must be a positive", function, I, 1, block_size=value)
            refuses("max_basis is .*; it must be a positive", function, I, 1, max_basis=value)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((3, BIG), "product"),
        ((BIG, torch.neg), "n"),
        ((3, torch.neg, "transpose_product", BIG), "transpose_product"),
        ((3, torch.neg, "dtype", BIG), "dtype"),
    ],
)
def test_operators_describe_tensors_instead_of_printing_them(arguments, name):
    positional, keywords = arguments[:2], dict([arguments[2:]] if arguments[2:] else [])
    is_tensor = rf"{name} is a tensor of shape \[30, 30\], torch\.float32 on cpu; it must be"
    refuses(is_tensor, "LinearOperator", *positional, **keywords)


def test_functions_describe_tensors_instead_of_printing_them():
    is_tensor = r"is a tensor of shape \[30, 30\], torch\.float32 on cpu; it must be"
    refuses(f"k {is_tensor}", "lanczos", BIG, BIG)
    refuses(f"which {is_tensor}", "lanczos", BIG, 1, which=BIG)
    refuses(r"B is \[a tensor of shape \[30, 30\].*\] \(list\); it must", "cg", BIG, [BIG])
    refuses("product is .*; torchium.linalg.Dense takes a matrix", "LinearOperator", 3, BIG)


@pytest.mark.parametrize("function", ["lanczos", "arnoldi"])
def test_other_arguments_of_eigenpairs(function):
    refuses(r"which is 3 \(int\); it must be a string", function, I, 1, which=3)
    refuses(r"tol is 'x' \(str\); it must be a number", function, I, 1, tol="x")
    refuses(r"start is 'x' \(str\); it must be a tensor", function, I, 1, start="x")


@pytest.mark.parametrize("function", ["hvp_operator", "fisher_operator"])
def test_losses_and_parameters_of_operators(function):
    w, half = (torch.ones(2, dtype=d, requires_grad=True) for d in (torch.float32, torch.float16))
    refuses(r"loss_fn is 3 \(int\); it must be a function", function, 3, [w])
    refuses(r"params\[1\] is float16; it must be float32 or float64", function, w.square, [w, half])
    refuses("params has no entries", function, w.square, [torch.ones(0, requires_grad=True)])


def test_the_loss_of_a_hessian_is_a_scalar():
    w = torch.ones(2, requires_grad=True)
    refuses(r"loss_fn returns \[2\]; it must return a scalar", "hvp_operator", w.square, [w])
    refuses("loss_fn returns float; it must return a scalar", "hvp_operator", lambda: 1.0, [w])
