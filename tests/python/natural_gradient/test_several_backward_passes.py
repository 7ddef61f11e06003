"""Backward passes over one forward pass bring parts of the same samples' gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchium
from torch import Tensor, nn
from torch.nn import functional as F


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.first(x), self.second(x)


def losses(model: TwoHeads, x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = model(x)
    return F.cross_entropy(first, x[:, :3].argmax(1)), second.square().mean(1).mean()


def at_once(model: TwoHeads, x: Tensor) -> None:
    sum(losses(model, x)).backward()


def from_the_front(model: TwoHeads, x: Tensor) -> None:
    loss = sum(losses(model, x))
    front = [*model.trunk[0].parameters()]
    others = [p for p in model.parameters() if all(p is not q for q in front)]
    loss.backward(inputs=front, retain_graph=True)
    loss.backward(inputs=others)


def from_the_back(model: TwoHeads, x: Tensor) -> None:
    loss = sum(losses(model, x))
    heads = [*model.first.parameters(), *model.second.parameters()]
    loss.backward(inputs=heads, retain_graph=True)
    loss.backward(inputs=[*model.trunk.parameters()])


def loss_by_loss(model: TwoHeads, x: Tensor) -> None:
    first, second = losses(model, x)
    first.backward(retain_graph=True)
    second.backward()


def with_a_penalty_between(model: TwoHeads, x: Tensor) -> None:
    first, second = losses(model, x)
    first.backward(retain_graph=True)
    torch.autograd.grad(second, model.trunk[2].weight, retain_graph=True)
    second.backward()


def after_a_discarded_pass(model: TwoHeads, x: Tensor) -> None:
    loss = sum(losses(model, x))
    if all(p.grad is None for p in model.parameters()):
        loss.backward(retain_graph=True)
        model.zero_grad(set_to_none=False)
    loss.backward()


def after_a_gradient_of_the_input(model: TwoHeads, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    loss = sum(losses(model, x))
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def trained(backward, accumulation: int = 1, **options: object) -> list[Tensor]:
    torch.manual_seed(0)
    model = TwoHeads().double()
    optimizer = torchium.NaturalGradient(model, lr=0.2, damping=0.05, **options)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(accumulation):
            backward(model, torch.randn(7, 5, dtype=torch.float64))
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "backward",
    [
        from_the_front,
        from_the_back,
        loss_by_loss,
        with_a_penalty_between,
        after_a_discarded_pass,
        after_a_gradient_of_the_input,
    ],
)
def test_passes_over_one_graph_count_their_samples_once(backward, accumulation):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(trained(backward, accumulation), trained(at_once, accumulation))


def test_the_step_is_that_of_the_dense_fisher_matrix():
    """theta <- theta - lr (J^T J / n + damping I)^-1 J^T 1 / n, J the gradients of samples."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    x = torch.randn(7, 5, dtype=torch.float64)
    params = [*model.parameters()]
    rows = []
    for sample in x.split(1):
        gradients = torch.autograd.grad(sum(losses(model, sample)), params)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    J = torch.stack(rows)
    fisher = J.T @ J / len(x) + 0.05 * torch.eye(J.shape[1], dtype=J.dtype)
    before = nn.utils.parameters_to_vector(params).detach()
    expected = before - 0.2 * torch.linalg.solve(fisher, J.mean(0))
    optimizer = torchium.NaturalGradient(model, lr=0.2, damping=0.05, momentum=0.0)
    loss_by_loss(model, x)
    optimizer.step()
    torch.testing.assert_close(nn.utils.parameters_to_vector(params).detach(), expected)


@pytest.mark.parametrize("backward", [from_the_front, from_the_back, loss_by_loss])
def test_rows_of_passes_over_one_graph_are_added(backward):
    model = TwoHeads().double()
    x = torch.randn(7, 5, dtype=torch.float64)
    rows = []
    for run in (at_once, backward):
        with torchium.per_sample(model):
            run(model, x)
        rows.append([p.grad_sample for p in model.parameters()])
    torch.testing.assert_close(rows[1], rows[0])
