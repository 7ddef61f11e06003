"""Products and solvers as operators: derivatives, fake tensors, compilation, autocast, bad input."""

from __future__ import annotations

import math

import pytest
import torch
import torchium
from matrix_cases import (
    randn,
    symmetric,
)
from torch import Tensor
from torch.library import opcheck
from torchium import linalg

ops = torch.ops.torchium

# --- derivatives, fake tensors, compilation ---

DIFFERENTIABLE = {
    "kron": [((3, 2), (2, 4)), ((2, 1, 3, 2), (3, 2, 2))],
    "kron_matmul": [((3, 2), (2, 4), (8, 3)), ((2, 1, 2, 2), (3, 2, 2), (4, 1))],
    "chunked_matmul": [
        ((3, 4), (4, 2)),
        ((2, 3, 4), (4, 2)),
        ((3, 4), (2, 4, 2)),
        ((2, 1, 3, 4), (3, 4, 2)),
    ],
    "fused_mul_add": [((3,), (3,), (3,)), ((3, 1), (4,), ()), ((2, 1), (1, 3), (2, 3))],
}
OTHERS = {
    "kron_solve": lambda *lead: (
        symmetric("spread", 2, batch=lead),
        symmetric("spread", 3, seed=1),
        randn(*lead, 6, 2),
        0.1,
    ),
    "spd_inverse": lambda *lead: (symmetric("spread", 3, batch=lead),),
    "spd_solve": lambda *lead: (symmetric("spread", 3, batch=lead), randn(3, 2)),
    "cholesky": lambda *lead: (symmetric("spread", 3, batch=lead),),
    "spd_logdet": lambda *lead: (symmetric("spread", 3, batch=lead),),
    "orthogonalize": lambda *lead: (randn(*lead, 4, 3),),
    "polar": lambda *lead: (randn(*lead, 3, 4),),
    "svd": lambda *lead: (randn(*lead, 3, 4),),
}
CASES = [(name, shapes) for name, cases in DIFFERENTIABLE.items() for shapes in cases]


@pytest.mark.parametrize(("name", "shapes"), CASES)
def test_derivatives(name, shapes):
    operands = [randn(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    function = getattr(ops, name)
    assert torch.autograd.gradcheck(function, operands)
    assert torch.autograd.gradgradcheck(function, operands)


@pytest.mark.parametrize(("name", "shapes"), CASES)
def test_batches_of_gradients(name, shapes):
    operands = [randn(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    result = getattr(ops, name)(*operands)
    gradients = randn(5, *result.shape)
    for k, operand in enumerate(operands):
        found = torch.autograd.grad(
            result, operand, gradients, retain_graph=True, is_grads_batched=True
        )[0]
        for g, each in zip(gradients, found, strict=True):
            expected = torch.autograd.grad(result, operand, g, retain_graph=True)[0]
            torch.testing.assert_close(each, expected, msg=f"operand {k}")


def test_fused_mul_add_derivatives_have_the_dtypes_of_the_operands():
    a = randn(4, 1, dtype=torch.float16).requires_grad_()
    b = randn(5, dtype=torch.float32).requires_grad_()
    c = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    linalg.fused_mul_add(a, b, c).sum().backward()
    assert [x.grad.dtype for x in (a, b, c)] == [x.dtype for x in (a, b, c)]
    assert c.grad == 20


def test_chunked_matmul_derivative_keeps_to_the_workspace():
    A, B = (randn(40, 40, dtype=torch.bfloat16, seed=i).requires_grad_() for i in range(2))
    linalg.chunked_matmul(A, B, max_workspace_bytes=2000).sum().backward()
    torch.testing.assert_close(A.grad, B.sum(1).expand(40, 40), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("name", "shapes"), CASES)
def test_opcheck_differentiable(name, shapes, device):
    operands = tuple(randn(*s, seed=i).to(device).requires_grad_() for i, s in enumerate(shapes))
    opcheck(getattr(ops, name).default, operands)


@pytest.mark.parametrize(("dtype", "lead"), [(torch.float32, (2,)), (torch.float64, ())])
@pytest.mark.parametrize("name", OTHERS)
def test_opcheck_others(name, dtype, lead, device):
    arguments = tuple(
        x.to(device, dtype) if isinstance(x, Tensor) else x for x in OTHERS[name](*lead)
    )
    opcheck(getattr(ops, name).default, arguments)


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *OTHERS])
def test_meta_tensors_have_the_shape_of_the_result(name):
    if name in OTHERS:
        arguments = OTHERS[name](2)
    else:
        arguments = tuple(randn(*s, seed=i) for i, s in enumerate(DIFFERENTIABLE[name][-1]))
    function = getattr(linalg, name)
    metas = function(*(x.to("meta") if isinstance(x, Tensor) else x for x in arguments))
    reals = function(*arguments)
    if isinstance(reals, Tensor):
        metas, reals = (metas,), (reals,)
    for meta, real in zip(metas, reals, strict=True):
        assert meta.shape == real.shape
        assert meta.dtype == real.dtype
        assert meta.stride() == real.stride()


def test_compiles_into_one_graph():
    def function(A, B, X, c):
        Y = linalg.chunked_matmul(linalg.kron(A, B), X)
        Y = linalg.fused_mul_add(Y, linalg.kron_matmul(A, B, X), c)
        with torch.no_grad():
            Z = linalg.spd_solve(A, linalg.spd_inverse(A, damping=1.0), damping=0.5)
        return Y + linalg.kron_solve(Z, B, X, 0.1).detach().sum()

    arguments = symmetric("spread", 3), symmetric("spread", 2, seed=1), randn(6, 4), randn(4)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_autocast_does_not_reach_inside(device):
    A, B = (randn(30, 30, dtype=torch.float32, seed=i).to(device) for i in range(2))
    X = randn(900, 2, dtype=torch.float32).to(device)
    outside = linalg.kron_matmul(A, B, X), linalg.chunked_matmul(A, B)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = linalg.kron_matmul(A, B, X), linalg.chunked_matmul(A, B)
    for x, y in zip(outside, inside, strict=True):
        assert torch.equal(x, y)


# --- bad input ---


@pytest.mark.parametrize("name", OTHERS)
def test_no_derivative_is_said_with_the_remedy(name):
    arguments = list(OTHERS[name]())
    arguments[0].requires_grad_()
    function = getattr(linalg, name)
    with pytest.raises(
        RuntimeError, match=f"{name} has no derivative, but [AX] requires.*torch.no_grad"
    ):
        function(*arguments)
    with torch.no_grad():
        result = function(*arguments)
    assert (result if isinstance(result, Tensor) else result[0]).isfinite().all()


I2, I3 = torch.eye(2), torch.eye(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linalg.kron(I2[0], I2), r"kron: A has shape \[2\].*two dimensions"),
        (lambda: linalg.kron(I2, I2.double()), r"kron: B has dtype Double"),
        (
            lambda: linalg.kron(I2.expand(2, 2, 2), I2.expand(3, 2, 2)),
            r"A \[2, 2, 2\] and B \[3, 2, 2\]",
        ),
        (lambda: linalg.kron(I2.int(), I2.int()), r"A has dtype Int"),
        (lambda: linalg.kron(I2.cfloat(), I2.cfloat()), r"A has dtype ComplexFloat"),
        (lambda: linalg.kron(I2.to_sparse(), I2), r"A has layout .*to_dense"),
        (lambda: linalg.kron(I2, I2.to("meta")), r"B is on meta"),
        (lambda: linalg.kron_matmul(I2, I3, I2), r"X has shape \[2, 2\].*\[\.\.\., 6, m\]"),
        (lambda: linalg.kron_solve(I2, I3, I2, 0.1), r"X has shape \[2, 2\].*\[\.\.\., 6, m\]"),
        (lambda: linalg.kron_solve(I2, torch.ones(2, 3), I2, 0.1), r"B has shape \[2, 3\]"),
        (lambda: linalg.kron_solve(I2, I2, torch.eye(4), -1.0), r"damping is -1"),
        (lambda: linalg.kron_solve(I2, I2, torch.eye(4), math.nan), r"damping is nan"),
        (lambda: linalg.chunked_matmul(I2, I3), r"A has shape \[2, 2\] and B \[3, 3\]"),
        (lambda: linalg.chunked_matmul(I2[0], I2), r"A has shape \[2\]"),
        (
            lambda: linalg.chunked_matmul(I2, I2, max_workspace_bytes=-1),
            r"max_workspace_bytes is -1",
        ),
        (
            lambda: linalg.chunked_matmul(I2.half(), I2.half(), max_workspace_bytes=19),
            r"is 19; .* needs 20",
        ),
        (lambda: linalg.spd_inverse(torch.ones(2, 3)), r"spd_inverse: A has shape \[2, 3\]"),
        (lambda: linalg.spd_inverse(I2, damping=math.inf), r"damping is inf"),
        (lambda: linalg.spd_inverse(I2, damping=1e300), r"damping is 1e\+300"),
        (lambda: linalg.spd_solve(I2, I3), r"spd_solve: X has shape \[3, 3\]"),
        (lambda: linalg.spd_solve(I2, I2.to_sparse()), r"X has layout"),
        (lambda: linalg.fused_mul_add(I2, I2, I2.int()), r"c has dtype Int"),
        (lambda: linalg.fused_mul_add(I2.cfloat(), I2, I2), r"a has dtype ComplexFloat"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_package_exports():
    assert torchium.linalg is linalg
    assert {"kron", "chunked_matmul", "spd_solve"} <= set(linalg.__all__)


def test_opcheck_in_place_and_out(device):
    a, b, c = ([randn(3, seed=i).to(device), randn(2, 2, seed=i).to(device)] for i in range(3))
    opcheck(ops.fused_mul_add_.default, (a, b, c))
    opcheck(ops.fused_mul_add.out, (a[0], b[0], c[0]), {"out": torch.empty_like(c[0])})
