"""fisher_operator, against dense Fisher matrices."""

from __future__ import annotations

import pytest
import torch
from reference import fisher_matrices as reference
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchium import linalg


def network(device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model.to(device), torch.randn(7, 4).double().to(device), torch.arange(7).to(device) % 3


def check(found: linalg.LinearOperator, exact: Tensor) -> None:
    assert found.shape == exact.shape
    X = torch.randn(len(exact), 4, dtype=torch.float64).to(exact)
    torch.testing.assert_close(found @ X, exact @ X)
    torch.testing.assert_close(found @ X[:, 0], exact @ X[:, 0])
    values = linalg.lanczos(found, 2).eigenvalues
    torch.testing.assert_close(values, torch.linalg.eigvalsh(exact).flip(0)[:2])


def test_the_empirical_fisher(device):
    model, x, y = network(device)
    losses = lambda model: F.cross_entropy(model(x), y, reduction="none")  # noqa: E731
    found = linalg.fisher_operator(lambda: losses(model), model.parameters())
    check(found, reference.empirical_fisher(model, losses))
    assert all(p.grad is None for p in model.parameters())


def test_the_fisher_of_a_classifier(device):
    model, x, y = network(device)

    def losses() -> tuple[Tensor, Tensor]:
        z = model(x)
        return F.cross_entropy(z, y, reduction="none"), z

    found = linalg.fisher_operator(losses, model.parameters(), fisher="ggn")
    check(found, reference.fisher_of_classes(model, x))


def test_the_gauss_newton_matrix_of_squares(device):
    model, x, _ = network(device)

    def losses() -> tuple[Tensor, Tensor]:
        z = model(x)
        return z.square().sum(1) / 2, z

    found = linalg.fisher_operator(losses, model.parameters(), fisher="ggn")
    check(found, reference.gauss_newton_of_squares(model, x))


def test_damped_systems_and_parameters_that_are_not_used():
    model, x, y = network(torch.device("cpu"))
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    losses = lambda: F.cross_entropy(model(x), y, reduction="none")  # noqa: E731
    params = [*model.parameters(), unused]
    A = linalg.fisher_operator(losses, params) + 0.1 * linalg.Identity(45, dtype=torch.float64)
    b = torch.ones(45, dtype=torch.float64)
    solution = linalg.cg(A, b, tol=1e-12).solution
    torch.testing.assert_close(A @ solution, b)
    torch.testing.assert_close(solution[-2:], b[-2:] / 0.1)


def test_losses_that_are_linear_in_the_outputs_have_no_curvature():
    model, x, _ = network(torch.device("cpu"))

    def losses() -> tuple[Tensor, Tensor]:
        z = model(x)
        return z.sum(1), z

    found = linalg.fisher_operator(losses, model.parameters(), fisher="ggn")
    assert bool((found @ torch.ones(43, dtype=torch.float64) == 0).all())


def test_what_has_no_fisher_matrix():
    model, x, y = network(torch.device("cpu"))
    params = list(model.parameters())
    z = model(x)
    losses = F.cross_entropy(z, y, reduction="none")

    def refuses(message: str, result, params=params, fisher="empirical") -> None:
        with pytest.raises(ValueError, match=message):
            linalg.fisher_operator(lambda: result, params, fisher=fisher)

    refuses('fisher is \'mc\'; it must be "empirical" or "ggn"', losses, fisher="mc")
    refuses("must return the losses of N samples", losses.mean())
    refuses("must return the losses of N samples", (losses, z))
    refuses("must return a pair of losses and outputs", losses, fisher="ggn")
    refuses("outputs must be a tensor .* with N = 7", (losses, z[:3]), fisher="ggn")
    refuses("do not depend on the outputs", (losses, model(x)), fisher="ggn")
    refuses("has no graph", losses.detach())
    refuses("has no graph", (losses, z.detach()), fisher="ggn")
    refuses("depend on none of params", losses, params=network(torch.device("cpu"))[0].parameters())
    refuses("params has no entries", losses, params=[])
    with pytest.raises(ValueError, match=r"fisher_operator: loss_fn is .*; it must be a function"):
        linalg.fisher_operator(losses, params)
    refuses(r"params\[1\] is in params twice", losses, params=[params[0], params[0]])


@pytest.mark.parametrize("fisher", ["empirical", "ggn", "hessian"])
def test_reentrant_checkpoints_are_refused(fisher):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(5, 3, requires_grad=True), torch.randint(2, (5,))

    def losses():
        z = model[2](checkpoint(model[:2], x, use_reentrant=True))
        found = F.cross_entropy(z, y, reduction="none")
        return (found, z) if fisher == "ggn" else found

    def operator():
        if fisher == "hessian":
            return linalg.hvp_operator(lambda: losses().mean(), model.parameters())
        return linalg.fisher_operator(losses, model.parameters(), fisher=fisher)

    with pytest.raises(ValueError, match=r"_operator: the model uses .* pass use_reentrant=False"):
        operator()
