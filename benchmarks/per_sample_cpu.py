"""Per-sample gradients on a CPU: torchium against torch.func and opacus."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
import torchium
from common import Report, interleaved, median_ratio, parse_arguments, result_file
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Run = Callable[[], object]


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def convnet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def forward_backward(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    def run() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    return run


def vmap_grad(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, params, (image.unsqueeze(0),))
        return nn.functional.cross_entropy(logits, label.unsqueeze(0))

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    return lambda: gradients(params, x, y)


def opacus_hooks(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model)

    def run() -> None:
        wrapped.zero_grad()
        for p in wrapped.parameters():
            p.grad_sample = None
        nn.functional.cross_entropy(wrapped(x), y).backward()

    return run


def torchium_rows(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    return lambda: torchium.per_sample_gradients(model, nn.functional.cross_entropy, x, y)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 784-512-512-10, batch 64": (lambda: mlp(512), (64, 784)),
    "MLP 784-512-512-10, batch 256": (lambda: mlp(512), (256, 784)),
    "ConvNet of the examples, batch 256": (convnet, (256, 1, 28, 28)),
}
METHODS = {
    "forward + backward": forward_backward,
    "torchium.per_sample_gradients": torchium_rows,
    "torch.func vmap(grad)": vmap_grad,
    "opacus GradSampleModule": opacus_hooks,
}


def main() -> int:
    arguments = parse_arguments(__doc__)
    report = Report("Per-sample gradients on a CPU")
    for title, (make_model, shape) in CASES.items():
        runs: dict[str, Run] = {}
        for name, method in METHODS.items():
            torch.manual_seed(0)
            runs[name] = method(make_model(), torch.randn(shape), torch.randint(10, shape[:1]))
            runs[name]()
        seconds = interleaved(runs, arguments.rounds)
        ours = seconds["torchium.per_sample_gradients"]
        rows = [
            [name, f"{statistics.median(times) * 1e3:.2f}", f"{median_ratio(times, ours):.2f}"]
            for name, times in seconds.items()
        ]
        report.table(title, ["", "ms", "ratio to torchium"], rows)
        report.check(
            f"{title}: torchium / opacus", median_ratio(ours, seconds[list(METHODS)[3]]), 1.0
        )
        report.check(
            f"{title}: torchium / vmap(grad)", median_ratio(ours, seconds[list(METHODS)[2]]), 1.3
        )
    return report.finish(result_file("per_sample_cpu", arguments))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
