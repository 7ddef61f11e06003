"""Forward-mode derivatives and torch.func with torchium.linalg: correct, or an error; never silently zero."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from matrix_cases import randn, symmetric
from reference.matrix_functions import from_spectrum
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.library import opcheck
from torchium import linalg
from torchium.linalg import matrix_power

ops = torch.ops.torchium
A = symmetric("spread", 5)
TANGENT = randn(5, 5, seed=3)

DIFFERENTIABLE = {
    "matrix_power": lambda A: matrix_power(A, -0.25, eps=0.1, relative_eps=0.1),
    "matrix_power of a list": lambda A: matrix_power([A, A[:3, :3]], 0.5)[1],
    "kron": lambda A: linalg.kron(A, A),
    "kron_matmul": lambda A: linalg.kron_matmul(A, A, A.reshape(25, 1)),
    "chunked_matmul": lambda A: linalg.chunked_matmul(A, A.mT),
    "fused_mul_add": lambda A: linalg.fused_mul_add(A, A.mT, A),
}
REFUSED = {
    "matrix_inverse_root": lambda A: linalg.matrix_inverse_root(A, 2),
    "matrix_inverse_root_info": lambda A: linalg.matrix_inverse_root(A, 2, return_info=True)[0],
    "matrix_inverse_root of a list": lambda A: linalg.matrix_inverse_root([A], 2)[0],
    "eigh": lambda A: linalg.eigh(A)[0],
    "eigh of a list": lambda A: linalg.eigh([A])[1][0],
    "spd_inverse": linalg.spd_inverse,
    "spd_solve": lambda A: linalg.spd_solve(A, torch.ones(5, 1, dtype=A.dtype)),
    "spd_solve by X": lambda X: linalg.spd_solve(A, X),
    "kron_solve": lambda A: linalg.kron_solve(A, A, torch.ones(25, 1, dtype=A.dtype), 0.1),
}
differentiable = pytest.mark.parametrize("f", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE.keys())
refused = pytest.mark.parametrize("f", REFUSED.values(), ids=REFUSED.keys())


def loss_of(f):
    return lambda A: f(A).sin().sum()


@pytest.mark.parametrize("relative_eps", [0.0, 0.1])
@pytest.mark.parametrize("exponent", [-2.0, -0.25, 0.0, 0.5, 1.0, 1.3, 2.0, 3.0])
def test_tangents_of_matrix_power(exponent, relative_eps):
    stack = from_spectrum(torch.tensor([[0.5, 1.0, 1.5, 4.0], [0.3, 0.4, 2.0, 3.0]]))
    function = lambda A: matrix_power(A, exponent, eps=0.1, relative_eps=relative_eps)  # noqa: E731
    assert torch.autograd.gradcheck(
        function, stack.requires_grad_(), check_forward_ad=True, check_batched_grad=True
    )


def test_tangents_at_coinciding_eigenvalues():
    for matrix in (torch.eye(4, dtype=torch.float64), from_spectrum(torch.tensor([1.0, 2.0, 2.0]))):
        assert torch.autograd.gradcheck(
            lambda A: matrix_power(A, -0.5), matrix.requires_grad_(), check_forward_ad=True
        )


@differentiable
def test_reverse_and_forward_mode(f):
    assert torch.autograd.gradcheck(f, A.clone().requires_grad_(), check_forward_ad=True)


@differentiable
def test_transforms_agree_with_autograd(f):
    loss, x = loss_of(f), A.clone().requires_grad_()
    loss(x).backward()
    slope = (x.grad * TANGENT).sum()
    torch.testing.assert_close(grad(loss)(A), x.grad)
    torch.testing.assert_close(grad(loss)(x), x.grad)  # as for the parameters of a module
    torch.testing.assert_close(vjp(loss, A)[1](torch.ones_like(slope))[0], x.grad)
    torch.testing.assert_close(jvp(loss, (A,), (TANGENT,))[1], slope)
    torch.testing.assert_close(jacfwd(f)(A), jacrev(f)(A))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@differentiable
def test_vmap(f):
    if f is DIFFERENTIABLE["matrix_power of a list"]:
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            vmap(f)(A.expand(3, 5, 5))
        return
    stack = torch.stack([A, 2 * A, 3 * A])
    loss = loss_of(f)
    torch.testing.assert_close(vmap(f)(stack), torch.stack([f(a) for a in stack]))
    torch.testing.assert_close(vmap(grad(loss))(stack), torch.stack([grad(loss)(a) for a in stack]))


@refused
def test_what_has_no_derivative_says_so(f):
    loss = lambda A: f(A).sum()  # noqa: E731
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"has no derivative.*tangent"):
        f(forward_ad.make_dual(A, TANGENT))
    with pytest.raises(RuntimeError, match="has no derivative"):
        jvp(loss, (A,), (TANGENT,))
    with pytest.raises(RuntimeError, match="has no derivative"):
        grad(loss)(A)


def test_a_tangent_is_dropped_where_it_is_asked_for():
    with forward_ad.dual_level():
        values, _ = linalg.eigh(forward_ad.make_dual(A, TANGENT).detach())
    assert values.isfinite().all()


def second_derivatives():
    loss = loss_of(lambda A: matrix_power(A, -0.5))
    yield "reverse over reverse", lambda: grad(lambda A: grad(loss)(A).sum())(A)
    yield "forward over reverse", lambda: jvp(grad(loss), (A,), (TANGENT,))
    slope = lambda A: jvp(loss, (A,), (TANGENT,))[1]  # noqa: E731
    yield "reverse over forward", lambda: grad(slope)(A)
    yield "forward over forward", lambda: jvp(slope, (A,), (TANGENT,))

    def dual_over_autograd() -> Tensor:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(A.clone().requires_grad_(), TANGENT)
            return torch.autograd.grad(loss(x), x)[0]

    yield "dual numbers over autograd", dual_over_autograd


@pytest.mark.parametrize("mode", [name for name, _ in second_derivatives()])
def test_second_derivatives_of_matrix_power_are_refused(mode):
    with pytest.raises(RuntimeError, match="differentiated once"):
        dict(second_derivatives())[mode]()


def test_the_graph_is_freed():
    x = A.clone().requires_grad_()
    loss = matrix_power(x, -0.5).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_opcheck_of_the_parts():
    _, values, vectors = ops._matrix_power(A, -0.5, 0.0, 0.1)
    for operator in (ops._matrix_power_backward, ops._matrix_power_forward):
        opcheck(operator.default, (TANGENT, A, values, vectors, -0.5, 0.1))
    opcheck(ops._matrix_power.default, (A, -0.5, 0.0, 0.1))
