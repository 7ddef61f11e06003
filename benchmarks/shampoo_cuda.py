"""Steps of the optimizers on a CUDA device, beside AdamW's; needs one, and is not part of run_all."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
import torchium
from common import Report, interleaved, parse_arguments, result_file
from torch import nn

NEVER = 10**9
MODELS = {
    "MLP 784-512-512-10": [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)],
    "4 x (2048 x 2048)": [(2048, 2048)] * 4,
    "1,000 matrices 8 x 8": [(8, 8)] * 1000,
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Shampoo, no roots due": lambda ps: torchium.Shampoo(ps, update_freq=NEVER),
    "Shampoo, roots due": lambda ps: torchium.Shampoo(ps, update_freq=1),
    "Adagrad": torchium.Adagrad,
    "torch.optim.AdamW foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
}


def synchronized_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        torch.cuda.synchronize()

    return step


def steps(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], None]]:
    """A step of each optimizer on its own parameters with fixed random gradients."""
    functions = {}
    for name, make in OPTIMIZERS.items():
        params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        functions[name] = synchronized_step(make(params))
    return functions


def main() -> int:
    arguments = parse_arguments(__doc__)
    report = Report(f"Optimizers on {torch.cuda.get_device_name()}")
    rows = []
    for model, shapes in MODELS.items():
        functions = steps(shapes)
        for _ in range(32):  # roots fall due at powers of two: none in the timed rounds
            functions["Shampoo, no roots due"]()
        interleaved(functions, 2)  # warm-up
        seconds = interleaved(functions, min(arguments.rounds, 29))
        rows.append([model, *(1e3 * statistics.median(seconds[name]) for name in OPTIMIZERS)])
    report.table("Milliseconds a step", ["parameters", *OPTIMIZERS], rows)
    return report.finish(result_file("shampoo_cuda", arguments))


if __name__ == "__main__":
    sys.exit(main())
