"""A physics-informed network for Poisson's equation, by natural gradient and, as long, by Adam.

    python poisson_pinn.py --target 1e-6

-Laplace(u) = f on the unit square with u = 0 on its boundary, and f such that u = sin(pi x) sin(pi y). The
residuals at points inside and on the boundary contain second derivatives with respect to the inputs of the network, so no
layer call gives their Jacobian. torch.func computes it, and update_jacobian() takes it. With a damping
proportional to the loss, a step is one of Levenberg and Marquardt.
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import pairwise

import torch
import torchium
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

Parameters = dict[str, Tensor]


class Network(nn.Module):
    """A multilayer perceptron with tanh, of one point [2]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [2, width, width, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """u, and its Laplacian by the chain rule, layer by layer (Li et al. 2023, arXiv 2307.08214)."""
        u, gradient, laplacian = point, torch.eye(2).to(point), torch.zeros_like(point)
        for layer in self.layers:
            if layer is not self.layers[0]:
                u = torch.tanh(u)
                slope = 1 - u.square()
                laplacian = slope * (laplacian - 2 * u * gradient.square().sum(0))
                gradient = slope * gradient
            u = layer(u)
            gradient, laplacian = gradient @ layer.weight.mT, laplacian @ layer.weight.mT
        return u.squeeze(-1), laplacian.squeeze(-1)


def exact(points: Tensor) -> Tensor:
    return torch.sin(math.pi * points).prod(-1)


def make_points(per_side: int) -> tuple[Tensor, Tensor]:
    """A grid inside the square, and as many points on each side of its boundary."""
    ticks = (torch.arange(per_side, dtype=torch.float64) + 0.5) / per_side
    zeros, ones = torch.zeros_like(ticks), torch.ones_like(ticks)
    sides = [(ticks, zeros), (ticks, ones), (zeros, ticks), (ones, ticks)]
    return torch.cartesian_prod(ticks, ticks), torch.cat([torch.stack(s, 1) for s in sides])


class Residuals:
    """r = Laplace(u) + f inside and r = u on the boundary.

    The loss is the mean of r^2 / 2 inside plus ``weight`` times that on the boundary. Both are scaled so that
    it is the mean over all points.
    """

    def __init__(self, network: Network, per_side: int, weight: float) -> None:
        self.network = network
        inside, boundary = make_points(per_side)
        count = len(inside) + len(boundary)
        self.parts = [
            (self.equation, inside, math.sqrt(count / len(inside))),
            (self.value, boundary, math.sqrt(weight * count / len(boundary))),
        ]

    def value(self, parameters: Parameters, point: Tensor) -> Tensor:
        u, _ = functional_call(self.network, parameters, point)
        return u

    def equation(self, parameters: Parameters, point: Tensor) -> Tensor:
        _, laplacian = functional_call(self.network, parameters, point)
        return laplacian + 2 * math.pi**2 * exact(point)

    def __call__(self) -> Tensor:
        """[points]"""
        parameters = dict(self.network.named_parameters())
        return torch.cat(
            [scale * vmap(r, (None, 0))(parameters, points) for r, points, scale in self.parts]
        )

    def with_jacobian(self) -> tuple[list[Tensor], Tensor]:
        """One [points, *shape] per parameter, and the residuals [points]."""
        parameters = {name: p.detach() for name, p in self.network.named_parameters()}
        rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
        residuals = []
        for r, points, scale in self.parts:
            gradients, values = vmap(grad_and_value(r), (None, 0))(parameters, points)
            residuals.append(scale * values)
            for name, of_points in gradients.items():
                rows[name].append(scale * of_points)
        return [torch.cat(parts) for parts in rows.values()], torch.cat(residuals)


def relative_error(network: Network) -> float:
    """In L2, on points that training does not see."""
    ticks = torch.linspace(0, 1, 101, dtype=torch.float64)
    points = torch.cartesian_prod(ticks, ticks)
    with torch.no_grad():
        error = vmap(network)(points)[0] - exact(points)
    return float(error.norm() / exact(points).norm())


def train_natural_gradient(arguments: argparse.Namespace) -> tuple[float, int, float]:
    """The relative error, steps and seconds, at the target or when the time is over."""
    torch.manual_seed(arguments.seed)
    network = Network(arguments.width).double()
    residuals = Residuals(network, arguments.per_side, arguments.boundary_weight)
    optimizer = torchium.NaturalGradient(network, lr=1.0, momentum=0.0)
    start, steps, error = time.perf_counter(), 0, relative_error(network)
    while error > arguments.target and time.perf_counter() - start < arguments.seconds:
        rows, r = residuals.with_jacobian()
        loss = float(r.square().mean() / 2)
        optimizer.param_groups[0]["damping"] = max(arguments.damping * loss, 1e-10)
        optimizer.update_jacobian(rows, r)
        optimizer.step()
        steps += 1
        error = relative_error(network)
    return error, steps, time.perf_counter() - start


def train_adam(arguments: argparse.Namespace, seconds: float) -> tuple[float, int]:
    """The relative error and steps of Adam, whose learning rate falls to zero over this time."""
    torch.manual_seed(arguments.seed)
    network = Network(arguments.width).double()
    residuals = Residuals(network, arguments.per_side, arguments.boundary_weight)
    optimizer = torch.optim.Adam(network.parameters(), lr=arguments.adam_lr)
    start, steps, passed = time.perf_counter(), 0, 0.0
    while passed < seconds:
        optimizer.param_groups[0]["lr"] = arguments.adam_lr * (1 - passed / seconds)
        optimizer.zero_grad()
        (residuals().square().mean() / 2).backward()
        optimizer.step()
        steps += 1
        passed = time.perf_counter() - start
    return relative_error(network), steps


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=24, help="of both hidden layers")
    parser.add_argument("--per-side", type=int, default=30, help="points of the grid")
    parser.add_argument("--boundary-weight", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=120.0, help="at most")
    parser.add_argument("--target", type=float, default=1e-6, help="relative error in L2")
    parser.add_argument("--damping", type=float, default=1e-3, help="in units of the loss")
    parser.add_argument("--adam-lr", type=float, default=1e-2, help="at the start")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    error, steps, seconds = train_natural_gradient(arguments)
    print(
        f"natural gradient: relative error {error:.2e} after {steps} steps, {seconds:.1f} seconds"
    )
    error, steps = train_adam(arguments, seconds)
    print(f"Adam: relative error {error:.2e} after {steps} steps, the same time")


if __name__ == "__main__":
    main()
