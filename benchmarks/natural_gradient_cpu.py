"""NaturalGradient on a CPU against the forward and backward pass."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
import torchium
from networks.curvature_models import mlp
from shared.common import Report, interleaved, median_ratio, parse_arguments, result_file
from torch import nn

BATCH = 64


def iteration(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None,
) -> Callable[[], None]:
    """One training iteration on random images; without an optimizer, forward and backward only."""
    torch.manual_seed(0)
    model = mlp(width=512)
    optimizer = None if make_optimizer is None else make_optimizer(model)
    x, y = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))

    def run() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if optimizer is not None:
            optimizer.step()

    return run


def main() -> int:
    arguments = parse_arguments(__doc__)
    report = Report("Natural gradient on a CPU")
    natural = torchium.NaturalGradient
    functions = {
        "forward + backward": iteration(None),
        "with SGD, momentum": iteration(
            lambda m: torch.optim.SGD(m.parameters(), lr=1e-6, momentum=0.9)
        ),
        "NaturalGradient": iteration(lambda m: natural(m, lr=1e-6)),
        "NaturalGradient, momentum": iteration(lambda m: natural(m, lr=1e-6, momentum=0.9)),
        "NaturalGradient, update_freq=10": iteration(lambda m: natural(m, lr=1e-6, update_freq=10)),
        'NaturalGradient, solver="cg"': iteration(
            lambda m: natural(m, lr=1e-6, solver="cg", eps=1e-4)
        ),
    }
    for function in functions.values():
        function()
    # Ten runs each, so with update_freq=10 every entry has one refresh.
    tenfold = {name: lambda f=f: [f() for _ in range(10)] for name, f in functions.items()}
    seconds = interleaved(tenfold, arguments.rounds)
    bare = seconds["forward + backward"]
    rows = [
        [name, f"{statistics.median(times) * 100:.2f}", f"{median_ratio(times, bare):.2f}"]
        for name, times in seconds.items()
    ]
    report.table(
        f"MLP 784-512-512-10, batch {BATCH}: a whole training iteration",
        ["", "ms", "ratio to forward + backward"],
        rows,
    )
    added = [whole - part for whole, part in zip(seconds["NaturalGradient"], bare, strict=True)]
    report.check(
        "an exact step / forward + backward",
        median_ratio(added, bare),
        2.0,
    )
    return report.finish(result_file("natural_gradient_cpu", arguments))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
