"""Estimators, Krylov methods, Kronecker products and AdaHessian on a stream of the caller."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchium
from torch import Tensor, nn
from torchium import linalg

pytestmark = pytest.mark.cuda
N = 200
CYCLES = 20_000_000  # about 10 ms


def definite(n: int) -> Tensor:
    torch.manual_seed(n)
    X = torch.randn(n, 2 * n, device="cuda")
    return X @ X.mT / (2 * n) + torch.diag(torch.linspace(0, 1, n, device="cuda"))


def on_late_stream(inputs: list[Tensor], run: Callable[..., list[Tensor]]) -> list[Tensor]:
    """The result on a stream where the inputs arrive late: work on any other stream reads NaN."""
    late = [torch.full_like(x, torch.nan) for x in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        for x, source in zip(late, inputs, strict=True):
            x.copy_(source)
        found = run(*late)
        copies = [x.clone() for x in found]  # on this stream, without a wait
    stream.synchronize()
    return copies


def by_function(A: Tensor) -> linalg.LinearOperator:
    return linalg.LinearOperator(len(A), lambda X: A @ X, device=A.device).assume(
        "positive_definite"
    )


METHODS: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "lanczos": lambda A, b: [linalg.lanczos(A, 3).eigenvalues],
    "lanczos of a function": lambda A, b: [linalg.lanczos(by_function(A), 3).eigenvalues],
    "arnoldi": lambda A, b: [linalg.arnoldi(A, 3, tol=1e-4).eigenvalues],
    "cg": lambda A, b: [linalg.cg(by_function(A), b).solution],
    "gmres": lambda A, b: [linalg.gmres(A, b).solution],
    "hutchinson_trace": lambda A, b: [linalg.hutchinson_trace(A).value],
    "hutchinson_diagonal": lambda A, b: [linalg.hutchinson_diagonal(A).value],
    "hutchinson_diagonal, tol": lambda A, b: [
        linalg.hutchinson_diagonal(A, num_samples=1000, tol=0.1).value
    ],
    "hutchpp": lambda A, b: [linalg.hutchpp(A).value],
    "xdiag": lambda A, b: [linalg.xdiag(A).value],
    "logdet": lambda A, b: [linalg.logdet(A).value],
    "solve": lambda A, b: [linalg.Dense(A).assume("positive_definite").solve(b)],
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_with_products(name):
    inputs = [definite(N), torch.ones(N, device="cuda")]
    run = METHODS[name]
    torch.testing.assert_close(on_late_stream(inputs, run), run(*inputs), rtol=1e-3, atol=1e-4)


def test_the_split_product_of_a_large_matrix():
    """On Hopper, in two fp16 parts."""
    A = torch.diag(torch.arange(1.0, 4097, device="cuda"))
    run = lambda A: [linalg.hutchinson_diagonal(A, num_samples=512).value]  # noqa: E731
    (found,) = on_late_stream([A], run)
    torch.testing.assert_close(found, A.diagonal())


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_kronecker_products(damping):
    orders = [(3, 17), (40, 33), (65, 8)]
    factors = [definite(n) for pair in orders for n in pair]
    X = [torch.randn(m * n, 2, device="cuda") for m, n in orders]

    def run(*inputs: Tensor) -> list[Tensor]:
        A, B, X = list(inputs[:6:2]), list(inputs[1:6:2]), list(inputs[6:])
        single = linalg.kron_matmul(A[0], B[0], X[0])
        operator = linalg.Kronecker(A[1], B[1]) @ X[1]
        lists = [*linalg.kron_matmul(A, B, X), *linalg.kron_solve(A, B, X, damping)]
        return [single, operator, linalg.kron(A[0], B[0]), *lists]

    inputs = [*factors, *X]
    torch.testing.assert_close(on_late_stream(inputs, run), run(*inputs), rtol=1e-3, atol=1e-3)


def test_steps_of_adahessian():
    torch.manual_seed(0)
    weights = [torch.randn(30, 20, device="cuda") / 5, torch.randn(30, device="cuda") / 5]
    x, y = torch.randn(64, 20, device="cuda"), torch.randn(64, 30, device="cuda")

    def run(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        torch.manual_seed(0)  # of the signs
        params = [nn.Parameter(weight.clone()), nn.Parameter(bias.clone())]
        optimizer = torchium.AdaHessian(params, lr=0.05, n_samples=2)
        for _ in range(4):
            optimizer.zero_grad()
            loss = (nn.functional.linear(x, *params).tanh() - y).square().mean()
            loss.backward(create_graph=True)
            optimizer.step()
        return [p.detach() for p in params]

    inputs = [*weights, x, y]
    torch.testing.assert_close(on_late_stream(inputs, run), run(*inputs), rtol=1e-3, atol=1e-4)
