"""Per-sample gradients, norms, inner products and clipped sums: torchium, torch.func and opacus.

With --device cuda or cpu. Every time includes the forward and the backward pass. Opacus is left out where
it is not installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable

import torch
from networks.curvature_models import convnet, mlp
from shared.common import Report, interleaved, median_ratio, parse_arguments, result_file
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torchium import gradients

Run = Callable[[], object]
MAX_NORM = 1.0
ROWS = "rows: torchium per_sample_gradients"
COMPILED = "rows: compiled vmap(grad)"
WRITES = "writing as many zeros"
PEERS = ("rows: vmap(grad)", COMPILED, "rows: opacus GradSampleModule")
HAS_OPACUS = importlib.util.find_spec("opacus") is not None
loss_fn = nn.functional.cross_entropy


def forward_backward(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    def run() -> None:
        model.zero_grad()
        loss_fn(model(x), y).backward()

    return run


def vmap_rows(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], dict[str, Tensor]]:
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, params, (image.unsqueeze(0),))
        return loss_fn(logits, label.unsqueeze(0))

    rows = vmap(grad(loss), in_dims=(None, 0, 0))
    return lambda: rows(params, x, y)


def compiled_rows(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    return torch.compile(vmap_rows(model, x, y))


def writes(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    rows = [torch.empty(len(x), *p.shape, device=x.device) for p in model.parameters()]

    def run() -> None:
        for row in rows:
            row.zero_()

    return run


def vmap_matrix(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    rows = vmap_rows(model, x, y)
    return lambda: torch.cat([r.flatten(1) for r in rows().values()], 1)


def vmap_gram(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    matrix = vmap_matrix(model, x, y)

    def run() -> Tensor:
        J = matrix()
        return J @ J.T

    return run


def vmap_clip(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    matrix = vmap_matrix(model, x, y)

    def run() -> Tensor:
        J = matrix()
        return (MAX_NORM / J.norm(dim=1)).clamp(max=1) @ J

    return run


def vmap_norms(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    matrix = vmap_matrix(model, x, y)
    return lambda: matrix().norm(dim=1)


def opacus_rows(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model)

    def run() -> None:
        wrapped.zero_grad()
        loss_fn(wrapped(x), y).backward()
        for p in wrapped.parameters():  # no method holds memory while others run
            p.grad_sample = None

    return run


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    """Norms without gradients, and a second backward pass for the clipped sum."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=MAX_NORM)

    def run() -> None:
        wrapped.zero_grad()
        losses = loss_fn(wrapped(x), y, reduction="none")
        losses.mean().backward(retain_graph=True)
        coefficients = wrapped.get_clipping_coef()
        wrapped.zero_grad()
        wrapped.disable_hooks()
        (losses * coefficients).sum().backward()
        wrapped.enable_hooks()

    return run


def ours(function: Callable[..., object], *options: object) -> Callable[..., Run]:
    return lambda model, x, y: lambda: function(model, loss_fn, x, y, *options)


def dots(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    vectors = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    return lambda: gradients.jvp_dots(model, loss_fn, x, y, vectors)


def block(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    def run() -> None:
        model.zero_grad()
        with gradients.per_sample(model):
            loss_fn(model(x), y).backward()
        for p in model.parameters():
            del p.grad_sample

    return run


METHODS: dict[str, Callable[[nn.Module, Tensor, Tensor], Run]] = {
    "forward + backward": forward_backward,
    WRITES: writes,
    ROWS: ours(gradients.per_sample_gradients),
    "rows: torchium per_sample": block,
    "rows: vmap(grad)": vmap_rows,
    COMPILED: compiled_rows,
    "rows: opacus GradSampleModule": opacus_rows,
    "norms: torchium per_sample_norms": ours(gradients.per_sample_norms),
    "norms: vmap(grad)": vmap_norms,
    "gram: torchium gram": ours(gradients.gram),
    "gram: vmap(grad)": vmap_gram,
    "clipped sum: torchium clip_and_accumulate": ours(gradients.clip_and_accumulate, MAX_NORM),
    "clipped sum: vmap(grad)": vmap_clip,
    "clipped sum: opacus ghost clipping": opacus_ghost,
    "J v: torchium jvp_dots": dots,
}
# Ratios of times, the largest that are accepted: on a GPU to forward + backward, on a CPU to others.
TARGETS = {
    "cuda": {
        ("norms: torchium per_sample_norms", "forward + backward"): 1.3,
        ("gram: torchium gram", "forward + backward"): 1.3,
    },
    "cpu": {
        (ROWS, "rows: vmap(grad)"): 1.3,
        (ROWS, "rows: opacus GradSampleModule"): 1.0,
        ("clipped sum: torchium clip_and_accumulate", "clipped sum: opacus ghost clipping"): 1.0,
    },
}


# On a GPU rows take this share of the time of the fastest peer; and what they add to forward + backward, of
# another time.
ROW_TARGETS = {"MLP": (1 / 1.25, WRITES, 1.5), "ConvNet": (1 / 1.5, "forward + backward", 0.4)}


def check_rows(report: Report, title: str, seconds: dict[str, list[float]]) -> None:
    of_best, other, share = ROW_TARGETS[title.split()[0]]
    peers = [name for name in PEERS if name in seconds]
    best = min(peers, key=lambda name: statistics.median(seconds[name]))
    report.check(f"{title}: {ROWS} / {best}", median_ratio(seconds[ROWS], seconds[best]), of_best)
    added = [a - b for a, b in zip(seconds[ROWS], seconds["forward + backward"], strict=True)]
    report.check(
        f"{title}: {ROWS} beyond forward + backward / {other}",
        statistics.median(added) / statistics.median(seconds[other]),
        share,
    )


def waited(run: Run, device: torch.device) -> Run:
    def timed() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return timed


def main() -> int:
    arguments = parse_arguments(__doc__, device=True)
    device = torch.device(arguments.device)
    side, mlp_batch, conv_batch = (8, 8, 4) if arguments.tiny else (32, 512, 256)
    if device.type == "cpu" and not arguments.tiny:
        mlp_batch, conv_batch, side = 64, 16, 16
    cases = {
        f"MLP 784-1024-1024-10, batch {mlp_batch}": (mlp, (mlp_batch, 784)),
        f"ConvNet 3-64-128-256 at {side} x {side}, batch {conv_batch}": (
            convnet,
            (conv_batch, 3, side, side),
        ),
    }
    report = Report(f"Per-sample quantities on {device.type}")
    for title, (make_model, shape) in cases.items():
        runs: dict[str, Run] = {}
        for name, method in METHODS.items():
            if "opacus" in name and not HAS_OPACUS:
                continue
            if name in (COMPILED, WRITES) and (device.type == "cpu" or arguments.tiny):
                continue  # for targets on a GPU
            torch.manual_seed(0)
            model = make_model(arguments.tiny).to(device)
            x = torch.randn(shape, device=device)
            y = torch.randint(10, shape[:1], device=device)
            runs[name] = waited(method(model, x, y), device)
            runs[name]()
        seconds = interleaved(runs, arguments.rounds)
        plain = seconds["forward + backward"]
        rows = [
            [name, f"{statistics.median(times) * 1e3:.2f}", f"{median_ratio(times, plain):.2f}"]
            for name, times in seconds.items()
        ]
        report.table(title, ["", "ms", "ratio to forward + backward"], rows)
        if device.type == "cuda" and not arguments.tiny:
            check_rows(report, title, seconds)
        for (name, other), target in TARGETS[device.type].items():
            if other in seconds and not arguments.tiny:
                ratio = median_ratio(seconds[name], seconds[other])
                report.check(f"{title}: {name} / {other}", ratio, target)
    return report.finish(result_file(f"curvature_{device.type}", arguments))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
