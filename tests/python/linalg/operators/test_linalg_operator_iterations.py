"""Operators without structure and above the order that is solved densely: iterations and estimates."""

from __future__ import annotations

import warnings

import pytest
import torch
from operator_cases import randn
from torch import Tensor
from torch.autograd import forward_ad
from torchium import linalg

N = 1200


def definite(n: int = N) -> Tensor:
    """Eigenvalues from 1 to 10 in a random basis of Householder reflections."""
    u = randn(n, 1) / randn(n, 1).norm()
    A = torch.diag(torch.linspace(1, 10, n, dtype=torch.float64))
    H = torch.eye(n, dtype=torch.float64) - 2 * u @ u.T
    return H @ A @ H


@pytest.fixture(scope="module")
def A() -> Tensor:
    return definite()


@pytest.fixture(scope="module")
def unsymmetric(A) -> Tensor:
    return A + 0.5 * randn(N, N, seed=1) / N**0.5


def known_by_products(A: Tensor) -> tuple[linalg.LinearOperator, list[int]]:
    columns: list[int] = []

    def product(X: Tensor) -> Tensor:
        columns.append(X.shape[1])
        return A @ X

    return linalg.LinearOperator(len(A), product, dtype=A.dtype, device=A.device), columns


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_solutions_by_conjugate_gradients_and_gmres(A, unsymmetric):
    B = randn(N, 3)
    operator, columns = known_by_products(A)
    declared = operator.assume("positive_definite")
    assert relative_error(declared.solve(B), torch.linalg.solve(A, B)) <= 1e-9
    assert relative_error(declared.solve(B, tol=1e-13), torch.linalg.solve(A, B)) <= 1e-12
    assert len(columns) < 150
    columns.clear()
    assert relative_error(operator.solve(B), torch.linalg.solve(A, B)) <= 1e-9
    assert len(columns) < 150
    operator, _ = known_by_products(unsymmetric)
    assert relative_error(operator.solve(B), torch.linalg.solve(unsymmetric, B)) <= 1e-9
    inverse = operator.inverse()
    assert relative_error(inverse.T @ B, torch.linalg.solve(unsymmetric.T, B)) <= 1e-9
    stacked = torch.stack([B, 2 * B])
    assert relative_error(inverse @ stacked, torch.linalg.solve(unsymmetric, stacked)) <= 1e-9


@pytest.mark.parametrize("symmetric", [True, False])
def test_functions_by_krylov_spaces(A, unsymmetric, symmetric):
    matrix = A if symmetric else unsymmetric
    operator, columns = known_by_products(matrix)
    if symmetric:
        operator = operator.assume("symmetric")
    X = randn(N, 2)
    values, V = torch.linalg.eig(matrix)
    coordinates = torch.linalg.solve(V, X.to(V))
    for function, image in (
        (operator.exp(tol=1e-11), values.exp()),
        (operator.sqrt(tol=1e-11), values.sqrt()),
        (operator.pow(-0.5, tol=1e-11), values**-0.5),
    ):
        columns.clear()
        found = function @ X
        assert relative_error(found, (V @ (image[:, None] * coordinates)).real) <= 1e-9
        assert len(columns) <= 200


def test_integer_powers_are_products(A):
    operator, columns = known_by_products(A)
    x = randn(N)
    assert relative_error((operator**3) @ x, A @ (A @ (A @ x))) <= 1e-13
    assert columns == [1, 1, 1]


def test_structure_around_large_parts(A):
    """Only the part without structure is iterated."""
    operator, _ = known_by_products(A)
    d = torch.linspace(1, 2, 5, dtype=torch.float64)
    K = linalg.Kronecker(operator.assume("positive_definite"), linalg.Diagonal(d))
    X = randn(5 * N, 1)
    assert relative_error(K @ K.solve(X, tol=1e-12), X) <= 1e-11
    S = operator.assume("positive_definite") + linalg.Diagonal(torch.ones(N).double())
    assert relative_error(S @ S.solve(X[:N]), X[:N]) <= 1e-9


def test_estimates_on_request(A):
    operator, columns = known_by_products(A)
    declared = operator.assume("positive_definite")
    assert abs(declared.trace() / A.trace() - 1) <= 1e-13
    assert sum(columns) == N
    columns.clear()
    trace = declared.trace(num_samples=60)
    assert sum(columns) == 60
    assert abs(trace / A.trace() - 1) <= 0.05
    assert relative_error(declared.diag(num_samples=100), A.diagonal()) <= 0.1
    assert abs(declared.logdet(num_samples=30) / torch.logdet(A) - 1) <= 0.05
    assert torch.equal(
        declared.logdet(num_samples=3, seed=7), declared.logdet(num_samples=3, seed=7)
    )
    d = torch.tensor([1.0, 2.0], dtype=torch.float64)
    blocks = linalg.BlockDiag(declared, linalg.Diagonal(d))
    assert abs(blocks.logdet(num_samples=30) / (torch.logdet(A) + d.log().sum()) - 1) <= 0.05
    with pytest.raises(ValueError, match=r'not known to be positive definite.*assume\("positive'):
        operator.logdet(num_samples=3)


def test_eigenpairs_by_krylov_methods(A, unsymmetric):
    operator, _ = known_by_products(A)
    values, vectors = operator.assume("symmetric").eigs(2, "LA")
    expected = torch.linspace(1, 10, N, dtype=torch.float64)[-2:].flip(0)
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=0)
    assert (A @ vectors - vectors * values).norm() <= 1e-6
    with pytest.raises(ValueError, match="eigs: k is missing"):
        operator.eigs()


def test_what_has_not_converged_is_told(A):
    operator, _ = known_by_products(A)
    x = randn(N, 1)
    inverse = operator.assume("positive_definite").inverse(max_iterations=3)
    for function, message in (
        (lambda: operator.solve(x, max_iterations=3), "gmres: 1 of 1 columns have not converged"),
        (lambda: inverse @ x, "cg: 1 of 1 columns have not converged"),
        (lambda: linalg.cg(A, x, max_iterations=3), "cg: 1 of 1 columns have not converged"),
        (
            lambda: (10 * operator).exp(max_iterations=20) @ x,
            "exp: after 20 iterations the result still changes",
        ),
    ):
        with pytest.warns(UserWarning, match=message) as caught:
            function()
        assert [each.filename for each in caught] == [__file__]  # the user's line
        assert "Triggered internally" not in str(caught[0].message)


def test_a_warning_that_is_an_error_is_raised():
    A = torch.diag(torch.tensor([1.0, 2, 0], dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="1 of 1 columns have not converged"):
            linalg.gmres(A, torch.ones(3, dtype=torch.float64))


def test_iterations_refuse_gradients(A):
    operator, _ = known_by_products(A)
    x = randn(N).requires_grad_()
    for function in [operator.inverse(), operator.exp()]:
        with pytest.raises(ValueError, match="iterative methods are not differentiable"):
            _ = function @ x
        with torch.no_grad():
            assert (function @ x).shape == x.shape


OF_A_MATRIX = {
    "lanczos": lambda A: linalg.lanczos(A, 2),
    "arnoldi": lambda A: linalg.arnoldi(A, 2),
    "hutchinson_trace": linalg.hutchinson_trace,
    "hutchinson_diagonal": linalg.hutchinson_diagonal,
    "hutchpp": linalg.hutchpp,
    "xdiag": linalg.xdiag,
    "logdet": linalg.logdet,
}
OF_A_VECTOR = {
    "cg": linalg.cg,
    "gmres": linalg.gmres,
    "solve by cg": lambda A, x: A.assume("positive_definite").solve(x),
    "solve by gmres": lambda A, x: A.solve(x),
    "exp": lambda A, x: A.exp() @ x,
    "sqrt by Lanczos": lambda A, x: A.assume("positive_definite").sqrt() @ x,
}


@pytest.mark.parametrize("function", OF_A_MATRIX.values(), ids=OF_A_MATRIX.keys())
def test_eigenpairs_and_estimates_refuse_tangents(function):
    A = definite(8)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="has a tangent"):
        function(forward_ad.make_dual(A, A))


@pytest.mark.parametrize("function", OF_A_MATRIX.values(), ids=OF_A_MATRIX.keys())
def test_eigenpairs_and_estimates_refuse_gradients(function):
    A = definite(8)
    with pytest.raises(ValueError, match=r"requires grad.*torch\.no_grad"):
        torch.func.grad(lambda A: function(A)[0].real.sum())(A)
    x = torch.ones((), dtype=A.dtype)

    def inner(A):  # differentiated by x alone
        return torch.func.grad(lambda x: x * function(A)[0].real.sum())(x)

    with pytest.raises(ValueError, match=r"requires grad.*torch\.no_grad"):
        torch.func.grad(inner)(A)
    with pytest.raises(ValueError, match="has a tangent"):
        torch.func.jvp(inner, (A,), (A,))
    A.requires_grad_()
    with pytest.raises(ValueError, match=r"requires grad.*torch\.no_grad"):
        function(A)
    with torch.no_grad():
        assert not function(A)[0].requires_grad


@pytest.mark.parametrize("function", OF_A_MATRIX.values(), ids=OF_A_MATRIX.keys())
def test_eigenpairs_and_estimates_refuse_vmap(function):
    A = torch.stack([definite(8), definite(8)])
    with pytest.raises(ValueError, match=r"dense_operator has no batching rule for torch\.vmap"):
        torch.vmap(function)(A)
    with pytest.raises(ValueError, match=r"product is batched by torch\.vmap"):
        torch.vmap(
            lambda A: function(linalg.LinearOperator(8, lambda X: A @ X, dtype=torch.float64))
        )(A)


@pytest.mark.parametrize("has_grad_mode", [True, False])
@pytest.mark.parametrize("where", ["operator", "vector"])
@pytest.mark.parametrize("function", OF_A_VECTOR.values(), ids=OF_A_VECTOR.keys())
def test_iterations_refuse_tangents(function, where, has_grad_mode, A):
    """They would be lost, or be those of the last iterations alone."""
    x = randn(N)
    with torch.set_grad_enabled(has_grad_mode), forward_ad.dual_level():
        C = forward_ad.make_dual(A, A) if where == "operator" else A
        operator = linalg.LinearOperator(N, lambda X: C @ X, dtype=torch.float64)
        if where == "vector":
            x = forward_ad.make_dual(x, x)
        with pytest.raises(ValueError, match="tangent"):
            function(operator, x)


SOLVERS = [linalg.cg, linalg.gmres]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


OPERATORS = {
    "dense": lambda A: A,
    "sparse": lambda A: A.to_sparse(),
    "products": lambda A: linalg.LinearOperator(len(A), lambda X: A @ X, dtype=torch.float64),
    "sum": lambda A: linalg.Dense(A) + linalg.Diagonal(A.diagonal()),
}


@pytest.mark.parametrize("columns", [(), (3,)])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
@pytest.mark.parametrize("solver", SOLVERS)
def test_solutions_are_differentiable(solver, operator, columns):
    A, B = definite(5).requires_grad_(), randn(5, *columns).requires_grad_()
    scale = torch.rand(5, dtype=torch.float64) + 0.5

    def solution(A, B):
        C = A if solver is linalg.gmres else (A + A.T) / 2
        return solver(operator(C), B, tol=1e-14, preconditioner=linalg.Diagonal(scale)).solution

    assert torch.autograd.gradcheck(solution, (A, B))
    assert torch.autograd.gradgradcheck(lambda B: solution(A.detach(), B), B)
    (slope,) = torch.autograd.grad(solution(A, B).sum(), A, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only if A requires grad"):
        slope.sum().backward()
    expected = torch.autograd.grad(solution(A, B).square().sum(), (A, B))
    with torch.no_grad():
        assert not solution(A, B).requires_grad
    if operator is not OPERATORS["sparse"]:  # torch.func has no sparse tensors
        found = torch.func.grad(lambda A, B: solution(A, B).square().sum(), argnums=(0, 1))(A, B)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b)


@pytest.mark.parametrize("solver", SOLVERS)
def test_solutions_are_differentiable_within_transforms(solver):
    """Each transform of torch.func around another one has a graph of its own."""
    A, B, v = definite(5), randn(5), randn(5)
    grad = torch.func.grad

    def outer_derivatives(solve):
        def loss(B):
            return solve(A, B).square().sum()

        def product(A, B):  # differentiated by x alone
            return grad(lambda x: (x * solve(A, B)).sum())(v).sum()

        yield grad(lambda B: grad(loss)(B) @ v)(B)
        yield grad(product)(A, B)
        yield grad(product, argnums=1)(A, B)
        C, D = A.clone().requires_grad_(), B.clone().requires_grad_()
        yield from torch.autograd.grad(product(C, D), (C, D))
        yield from torch.autograd.grad(grad(loss)(D) @ v, D)

    found = outer_derivatives(lambda A, B: solver(A, B, tol=1e-14).solution)
    for a, b in zip(found, outer_derivatives(torch.linalg.solve), strict=True):
        assert torch.allclose(a, b)

    def of_matrix(A):
        return solver(A, B).solution.square().sum()

    with pytest.raises(RuntimeError, match="differentiated once only if A requires grad"):
        grad(lambda A: grad(of_matrix)(A).sum())(A)
    for f, x in [(of_matrix, A), (lambda B: solver(A, B).solution.square().sum(), B)]:
        with pytest.raises(ValueError, match="tangent"):
            torch.func.jvp(grad(f), (x,), (x,))


@pytest.mark.parametrize("solver", SOLVERS)
def test_derivatives_at_zero(solver):
    A, B = definite(5).requires_grad_(), torch.zeros(5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(torch.autograd.grad(solver(A, B.detach()).solution.sum(), A)[0], A * 0)
    slopes = torch.autograd.grad(solver(A, B).solution.sum(), (A, B), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only if A requires grad"):
        sum(slope.sum() for slope in slopes).backward()


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_refuse_vmap(solver):
    A, B = definite(5), randn(2, 5)
    with pytest.raises(ValueError, match=r"B is batched by torch\.vmap; pass all vectors"):
        torch.vmap(lambda b: solver(A, b).solution)(B)
    b = B[0].clone().requires_grad_()
    with pytest.raises(ValueError, match=r"B is batched by torch\.vmap; pass all vectors"):
        torch.autograd.grad(solver(A, b).solution, b, torch.eye(5).double(), is_grads_batched=True)
    with pytest.raises(ValueError, match=r"A is batched by torch\.vmap; solve with one matrix"):
        torch.vmap(
            lambda d: (
                solver(
                    linalg.LinearOperator(5, lambda X: d[:, None] * X, dtype=d.dtype), B[0]
                ).solution
            )
        )(B.abs())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solvers(solver, dtype, device):
    A = definite(300).to(device, dtype)
    B = randn(300, 4).to(device, dtype)
    B[:, 2] = 0  # solved from the start
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = solver(A, B)
        single = solver(A, B[:, 0])
    tol = torch.finfo(dtype).eps ** (2 / 3)
    residuals = (B.double() - A.double() @ found.solution.double()).norm(dim=0)
    assert bool(found.converged.all())
    assert (residuals <= 1.1 * tol * B.double().norm(dim=0)).all()
    torch.testing.assert_close(found.residual_norms, residuals, rtol=0.2, atol=1e-12)
    assert found.solution.dtype == dtype
    assert found.iterations < 100
    assert single.solution.shape == (300,)
    assert single.residual_norms.shape == single.converged.shape == ()
    assert not found.solution[:, 2].any()


@pytest.mark.parametrize("solver", SOLVERS)
def test_preconditioners_save_iterations(solver):
    d = torch.logspace(0, 4, 400, dtype=torch.float64)
    A = torch.diag(d) + 0.1 * definite(400)
    b = randn(400)
    plain = solver(A, b, max_iterations=5000)
    P = linalg.Diagonal(1 / A.diagonal())
    preconditioned = solver(A, b, preconditioner=P)
    assert bool(preconditioned.converged)
    assert preconditioned.iterations < plain.iterations / 3
    assert relative_error(preconditioned.solution, torch.linalg.solve(A, b)) <= 1e-6


@pytest.mark.parametrize("restart", [5, 20, 400])
def test_gmres_restarts(restart):
    A = definite(300) + 0.5 * randn(300, 300, seed=1) / 300**0.5
    b = randn(300)
    found = linalg.gmres(A, b, restart=restart)
    assert bool(found.converged)
    assert relative_error(A @ found.solution, b) <= 1e-10


def test_solvers_of_invariant_spaces():
    """The Krylov space ends before the order of the matrix."""
    A = 2 * torch.eye(300, dtype=torch.float64)
    A[0, 0] = 5
    B = randn(300, 2)
    for solver in SOLVERS:
        found = solver(A, B, tol=1e-14)
        assert bool(found.converged.all())
        assert relative_error(found.solution, torch.linalg.solve(A, B)) <= 1e-13


def test_conjugate_gradients_refuse_indefinite_matrices():
    A = torch.diag(torch.linspace(-1, 1, 50, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"cg: A is not positive definite.*Use gmres"):
        linalg.cg(A, torch.ones(50, dtype=torch.float64))


def test_conjugate_gradients_name_the_preconditioner():
    A, b = torch.eye(50), torch.ones(50)
    message = "A is not positive definite, or preconditioner is not"
    with pytest.raises(ValueError, match=message):
        linalg.cg(A, b, preconditioner=torch.zeros(50, 50))


def test_gmres_of_a_singular_matrix_tells_that_it_fails():
    A = torch.diag(torch.tensor([1.0, 2, 0], dtype=torch.float64))
    with pytest.warns(UserWarning, match="1 of 1 columns have not converged"):
        found = linalg.gmres(A, torch.ones(3, dtype=torch.float64))
    assert torch.isfinite(found.solution).all()
    assert not bool(found.converged)


@pytest.mark.parametrize("method", [linalg.cg, linalg.gmres])
@pytest.mark.parametrize(
    ("dtype", "units"),
    [(torch.float32, (1e-42, 1e-30, 1e30, 1e37)), (torch.float64, (1e-310, 1e-200, 1e200, 1e300))],
)
def test_columns_of_any_scale_have_solutions(method, dtype, units):
    A = definite(50).to(dtype)
    units = torch.tensor([0.0, 1.0, *units], dtype=torch.float64)
    B = randn(50, 1).to(dtype) * units.to(dtype)
    found = method(A, B, tol=1e-3 if dtype == torch.float32 else None)
    assert found.converged.all()
    assert (found.residual_norms <= 2e-3 * units * 50).all()
    exact = torch.linalg.solve(A.double(), (B / units.to(dtype)).nan_to_num().double())
    error = ((found.solution.double() / units).nan_to_num() - exact).norm(dim=0)
    assert (error <= 2e-3 * exact.norm(dim=0)).all()


@pytest.mark.parametrize("method", [linalg.cg, linalg.gmres])
def test_columns_that_are_not_finite_yield_nan_alone(method):
    A, B = definite(50), randn(50, 4)
    expected = method(A, B).solution
    B[3, 1], B[7, 2] = torch.nan, torch.inf
    with pytest.warns(UserWarning, match="2 of 4 columns have not converged"):
        found = method(A, B)
    assert found.converged.tolist() == [True, False, False, True]
    assert found.solution[:, 1:3].isnan().all()
    assert found.residual_norms[1:3].isnan().all()
    torch.testing.assert_close(found.solution[:, ::3], expected[:, ::3])


@pytest.mark.parametrize("method", [linalg.cg, linalg.gmres])
def test_right_hand_sides_and_preconditioners_that_do_not_fit(method):
    A, b = definite(4), randn(4)
    name = method.__name__

    def refuses(message: str, b: Tensor, preconditioner=None) -> None:
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            method(A, b, preconditioner=preconditioner)

    refuses(r"B has layout Sparse; pass a dense tensor", b.to_sparse())
    refuses("preconditioner is of type str", b, "diagonal")
    refuses(r"preconditioner is torch\.int64", b, torch.eye(4).long())
    refuses("preconditioner is Float on cpu, A is Double", b, torch.eye(4))
