"""Training runs of the character Transformer, and what they record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torchium
from torch import Tensor
from torch.optim import Optimizer
from transformer_model import Shape, Text, Transformer, loss_of

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of matrices

Optimizers = list[Optimizer]  # they share the parameters of one model


def adamw(model: Transformer, lr: float, without: frozenset[int] = frozenset()) -> Optimizer:
    """For all parameters but those `without`, by id."""
    params = [p for p in model.parameters() if id(p) not in without]
    groups = [
        {"params": [p for p in params if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    is_cuda = params[0].is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=is_cuda or None)


def muon(model: Transformer, lr: float) -> Optimizers:
    """Muon for the hidden matrices, with steps of AdamW's root mean square, and AdamW for the rest."""
    hidden = model.hidden_matrices()
    rest = adamw(model, lr, frozenset(map(id, hidden)))
    options = {"weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}
    return [torch.optim.Muon(hidden, lr=lr, **options), rest]


def shampoo(update_freq: int) -> Callable[[Transformer, float], Optimizers]:
    def make(model: Transformer, lr: float) -> Optimizers:
        return [torchium.Shampoo.from_adamw(adamw(model, lr), update_freq=update_freq)]

    return make


OPTIMIZERS: dict[str, Callable[[Transformer, float], Optimizers]] = {
    "AdamW": lambda model, lr: [adamw(model, lr)],
    "Muon": muon,
    "Shampoo-1": shampoo(1),
    "Shampoo-10": shampoo(10),
    "Shampoo-100": shampoo(100),
}


@dataclass(frozen=True)
class Settings:
    shape: Shape = field(default_factory=Shape)
    batch: int = 64
    steps: int = 1000
    warm_up: int = 50
    evaluate_every: int = 50
    graph: bool = False  # forward and backward pass as one CUDA graph

    def conditions(self, device: torch.device) -> str:
        """What the seconds of a run depend on; only runs with the same are compared."""
        is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else "CPU"
        precision = torch.get_float32_matmul_precision()
        return f"{name}, {'graph' if self.graph else 'eager'}, float32 products: {precision}"

    def learning_rate(self, step: int) -> float:
        """The share of the peak at `step`, from 0: linear warm-up, then a cosine to zero."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        return 0.5 + 0.5 * math.cos(math.pi * (step - self.warm_up) / (self.steps - self.warm_up))


@dataclass
class Run:
    """Losses are recorded every so many steps; the seconds are those of training alone."""

    optimizer: str
    lr: float
    seed: int
    length: int  # steps that were asked for
    conditions: str  # what its seconds depend on
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    train_losses: list[float] = field(default_factory=list)  # mean since the last record
    validation_losses: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)  # of every step

    @property
    def key(self) -> tuple[object, ...]:
        return self.optimizer, self.lr, self.seed, self.length, self.conditions

    @property
    def final(self) -> float:
        """The last validation loss; infinite for a run that diverged."""
        last = self.validation_losses[-1]
        return last if math.isfinite(last) else math.inf

    def first_below(self, loss: float) -> tuple[float, float] | None:
        """(steps, seconds) until the validation loss passes `loss`, linear between records."""
        losses = self.validation_losses
        for i, value in enumerate(losses):
            if value <= loss:
                share = (losses[i - 1] - loss) / (losses[i - 1] - value) if i else 1.0
                return tuple(  # type: ignore[return-value]
                    (axis[i - 1] if i else 0) * (1 - share) + axis[i] * share
                    for axis in (self.steps, self.seconds)
                )
        return None


class Stopwatch:
    """Of the optimizer's steps, without a wait: by events on the stream, or by the CPU's clock."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._marks: list[tuple[object, object]] = []

    def mark(self) -> object:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def keep(self, start: object) -> None:
        self._marks.append((start, self.mark()))

    def milliseconds(self) -> list[float]:
        """Of all kept; the device must be done with them."""
        if self._is_cuda:
            return [a.elapsed_time(b) for a, b in self._marks]  # type: ignore[attr-defined]
        return [1e3 * (b - a) for a, b in self._marks]  # type: ignore[operator]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gradient_function(
    model: Transformer, text: Text, settings: Settings, starts: Tensor
) -> Callable[[Tensor], Tensor]:
    """A function of the starts of a batch that sets the gradients and returns the loss."""

    def compute(batch: Tensor) -> Tensor:
        for p in model.parameters():
            p.grad = None
        loss = loss_of(model, *text.batch(batch, settings.shape.context))
        loss.backward()
        return loss.detach()

    if not settings.graph:
        return compute
    batch = starts.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            compute(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = compute(batch)

    def replay(starts: Tensor) -> Tensor:
        batch.copy_(starts)
        graph.replay()
        return loss

    return replay


def train(text: Text, settings: Settings, name: str, lr: float, seed: int) -> Run:
    """A fresh model; the same seed gives the same weights and batches to every optimizer.

    The host waits for the device at records alone. A run whose loss is not finite ends there.
    """
    torch.manual_seed(seed)
    device = text.train.device
    context = settings.shape.context
    model = Transformer(text.symbols, settings.shape).to(device)
    optimizers = OPTIMIZERS[name](model, lr)
    groups = [(group, group["lr"]) for o in optimizers for group in o.param_groups]
    starts = text.starts(settings.steps, settings.batch, context, seed)
    compute = gradient_function(model, text, settings, starts[0])
    run = Run(name, lr, seed, settings.steps, settings.conditions(device))
    watch = Stopwatch(device.type == "cuda")
    total = torch.zeros((), device=device)
    seconds = 0.0
    synchronize(device)
    begin = time.perf_counter()
    for step in range(settings.steps):
        total += compute(starts[step])
        for group, peak in groups:
            group["lr"] = peak * settings.learning_rate(step)
        start = watch.mark()
        for optimizer in optimizers:
            optimizer.step()
        watch.keep(start)
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
            synchronize(device)
            seconds += time.perf_counter() - begin
            count = step + 1 - (run.steps[-1] if run.steps else 0)
            run.steps.append(step + 1)
            run.seconds.append(seconds)
            run.train_losses.append(float(total) / count)
            run.validation_losses.append(float(text.validation_loss(model, context)))
            total.zero_()
            if not math.isfinite(run.validation_losses[-1]):
                break
            synchronize(device)
            begin = time.perf_counter()
    run.optimizer_ms = [round(ms, 4) for ms in watch.milliseconds()]
    return run
