"""K-FAC on a CPU against its matrix products alone."""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable

import torch
import torchium
from networks.curvature_models import mlp
from shared.common import Report, interleaved, median_ratio, parse_arguments, result_file
from torch import Tensor, nn

NEVER = 10**9  # a TCov or TInv that is never reached
TCOV = 10
TARGET = 1.3


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(128, 256, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


class Workload:
    """A model, a batch, and the sizes of its layers."""

    def __init__(self, make: Callable[[], nn.Module], *input_shape: int) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.x = torch.randn(input_shape)
        self.y = torch.randint(10, input_shape[:1])
        self.layers: list[tuple[int, int, int]] = []  # o, a (with the bias), rows N T
        output = self.x
        for module in self.model:
            output = module(output)
            if hasattr(module, "weight"):
                o, a = module.weight.shape[0], module.weight[0].numel() + 1
                self.layers.append((o, a, output.numel() // o))

    def forward_backward(self, model: nn.Module) -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(self.x), self.y).backward()

    def directions(self, split: str) -> Callable[[], None]:
        """The products that precondition V of every layer: two, or four in an eigenbasis."""
        matrices = [
            (torch.randn(o, a), torch.randn(o, o), torch.randn(a, a)) for o, a, _ in self.layers
        ]
        outputs = [(torch.empty_like(V), torch.empty_like(V)) for V, _, _ in matrices]

        def products() -> None:
            for (V, G, A), (half, direction) in zip(matrices, outputs, strict=True):
                torch.mm(G, V, out=half)
                torch.mm(half, A, out=direction)
                if split == "exact":
                    torch.mm(G.mT, direction, out=half)
                    torch.mm(half, A.mT, out=direction)

        return products

    def factors(self) -> Callable[[], None]:
        """The Gram products of inputs and output gradients, in full."""
        captured: list[tuple[Tensor, Tensor]] = []
        for o, a, rows in self.layers:
            captured += [(torch.randn(n, rows), torch.empty(n, n)) for n in (a, o)]

        def products() -> None:
            for X, out in captured:
                torch.mm(X, X.mT, out=out)

        return products

    def eigensystems(self) -> Callable[[], None]:
        """LAPACK on matrices with the sizes of all factors."""
        orders = [n for o, a, _ in self.layers for n in (a, o)]
        matrices = [X @ X.mT for X in (torch.randn(n, n) for n in orders)]

        def eigh() -> None:
            for matrix in matrices:
                torch.linalg.eigh(matrix)

        return eigh

    def optimizer(self, split: str, **schedule: int) -> tuple[nn.Module, torchium.KFAC]:
        """A copy of the model, with an optimizer that has factors, inverses and gradients."""
        model = copy.deepcopy(self.model)
        optimizer = torchium.KFAC(model, lr=1e-4, damping_split=split, **schedule)
        self.forward_backward(model)
        optimizer.step()
        return model, optimizer


def measure(report: Report, name: str, work: Workload, split: str, rounds: int) -> list[object]:
    """A row of the table: milliseconds and ratios of the three kinds of steps."""
    label = f"{name}, {split}"
    directions, factors, eigh = work.directions(split), work.factors(), work.eigensystems()
    _, plain = work.optimizer(split, TCov=NEVER, TInv=NEVER)
    with_factors, capturing = work.optimizer(split, TCov=1, TInv=NEVER)
    _, inverting = work.optimizer(split, TCov=NEVER, TInv=1)
    without = copy.deepcopy(work.model)

    def iteration() -> None:
        work.forward_backward(with_factors)
        capturing.step()

    for function in (plain.step, iteration, directions, factors):
        function()
    t = interleaved(
        {
            "step": plain.step,
            "iteration": iteration,
            "without": lambda: work.forward_backward(without),
            "directions": directions,
            "factors": factors,
        },
        rounds,
    )
    # The total cost of K-FAC in an iteration with capture: hooks, sums and the step.
    added = [a - b for a, b in zip(t["iteration"], t["without"], strict=True)]
    both = [a + b for a, b in zip(t["directions"], t["factors"], strict=True)]
    ratios = [median_ratio(t["step"], t["directions"]), median_ratio(added, both)]
    report.check(f"{label}: step / its bare products", ratios[0], TARGET)
    cycle = [
        [(TCOV - 1) * a + b for a, b in zip(one, other, strict=True)]
        for one, other in ((t["step"], added), (t["directions"], both))
    ]
    report.check(
        f"{label}: all of {TCOV} steps, factors due once / its bare products",
        median_ratio(*cycle),
        TARGET,
    )

    due = interleaved({"step": inverting.step, "eigh": eigh}, max(3, rounds // 5))
    inverse = [statistics.median(t["directions"]) + e for e in due["eigh"]]
    row: list[object] = [label]
    for ours, bare, ratio in [
        (t["step"], t["directions"], ratios[0]),
        (added, both, ratios[1]),
        (due["step"], inverse, median_ratio(due["step"], inverse)),
    ]:
        row += [1e3 * statistics.median(ours), 1e3 * statistics.median(bare), ratio]
    return row


def main() -> int:
    arguments = parse_arguments(__doc__)
    report = Report("K-FAC on a CPU")
    workloads = {
        "MLP 784-512-512-10, batch 128": Workload(lambda: mlp(width=512), 128, 784),
        "ConvNet 3-64-128-256-256-10, batch 32 of 32 x 32": Workload(convnet, 32, 3, 32, 32),
    }
    rows = [
        measure(report, name, work, split, arguments.rounds)
        for name, work in workloads.items()
        for split in ("pi", "exact")
    ]
    report.table(
        "One step, ms (factors due: all that K-FAC adds to an iteration, its hooks included)",
        [
            "model, damping_split",
            *("nothing due", "products", "ratio"),
            *("factors due", "products", "ratio"),
            *("inverses due", "products + eigh", "ratio"),
        ],
        rows,
    )
    return report.finish(result_file("kfac_cpu", arguments))


if __name__ == "__main__":
    sys.exit(main())
