"""What the layers of a model receive and give back, collected by autograd alone, and models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

Batch = tuple[Tensor, Tensor]
KINDS = {
    nn.Linear: 0,
    nn.Conv2d: 1,
    nn.Embedding: 2,
    nn.LayerNorm: 3,
    nn.GroupNorm: 4,
    nn.Conv3d: 5,
    nn.ConvTranspose2d: 1,
    nn.RMSNorm: 6,
}


@dataclass
class Captured:
    """Arguments of the operators, in the order of their schemas."""

    params: list[Tensor]
    inputs: list[Tensor] = field(default_factory=list)
    output_gradients: list[Tensor] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    call_eps: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)  # of the mean loss, one per parameter
    samples: int = 0

    @property
    def arguments(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int], list[float]]:
        return self.params, self.inputs, self.output_gradients, self.calls, self.call_eps

    @property
    def layers(self) -> tuple[list[Tensor], list[Tensor], list[int], list[float]]:
        return self.inputs, self.output_gradients, self.calls, self.call_eps


def settings_of(module: nn.Module) -> list[int]:
    if isinstance(module, _ConvNd):
        settings = [*module.stride, *module.padding, *module.dilation, module.groups]
        settings.append(int(module.transposed))
    elif isinstance(module, nn.Embedding):
        settings = [-1 if module.padding_idx is None else module.padding_idx]
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        settings = [len(module.normalized_shape)]
    elif isinstance(module, nn.GroupNorm):
        settings = [module.num_groups]
    else:
        settings = []
    return settings + [0] * (12 - len(settings))


def forward(
    model: nn.Module, inputs: Tensor
) -> tuple[Tensor, list[tuple[nn.Module, Tensor, Tensor]]]:
    """The output, and the (layer, input, output) of every layer that ran."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda m, x, y: calls.append((m, x[0].detach(), y)))
        for module in model.modules()
        if type(module) in KINDS
    ]
    output = model(inputs)
    for handle in handles:
        handle.remove()
    return output, calls


def capture(
    model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], batches: Sequence[Batch]
) -> Captured:
    """One backward pass a batch, of its share of the mean loss of all samples."""
    params = [p for p in model.parameters() if p.requires_grad]
    index = {p: i for i, p in enumerate(params)}
    result = Captured(params, samples=sum(len(x) for x, _ in batches))
    result.gradients = [torch.zeros_like(p) for p in params]
    for micro_batch, (inputs, targets) in enumerate(batches):
        output, calls = forward(model, inputs)
        loss = loss_fn(output, targets) * (len(inputs) / result.samples)
        outputs = [output for _, _, output in calls]
        found = torch.autograd.grad(loss, [*outputs, *params], materialize_grads=True)
        for total, gradient in zip(result.gradients, found[len(outputs) :], strict=True):
            total += gradient
        for (module, x, _), gradient in zip(calls, found, strict=False):
            weight, bias = (
                index.get(getattr(module, name, None), -1) for name in ("weight", "bias")
            )
            result.inputs.append(x)
            result.output_gradients.append(gradient)
            result.call_eps.append(getattr(module, "eps", 0.0))
            result.calls += [KINDS[type(module)], weight, bias, micro_batch, *settings_of(module)]
    return result


class Sequence4d(nn.Module):
    """Linear layers on two dimensions of positions, one of them used twice, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.norm = nn.LayerNorm((3, 6))
        self.last = nn.Linear(6, 3, bias=False)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:  # [n, 2, 3, 4]
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(self.norm(self.second(x))).mean((1, 2))


class Language(nn.Module):
    """Looks words up, mixes neighbours, and maps back to words, with the same table if `tied`."""

    def __init__(self, tied: bool, words: int = 7) -> None:
        super().__init__()
        self.table = nn.Embedding(words, 5, padding_idx=0)
        self.norm = nn.LayerNorm(5)
        self.mix = nn.Linear(5, 5)
        self.out = nn.Linear(5, words)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:  # [n, T] -> [n, words]
        e = self.table(x)
        return self.out(e + torch.tanh(self.mix(self.norm(e)))).cumsum(1)[:, -1] / x.shape[1]


class TwoTables(nn.Module):
    """The same table read with two sequences, and one parameter that no sample reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:  # [n, T]
        return self.out(torch.cat([self.table(x).sum(1), self.table(x[:, :1]).square().sum(1)], 1))


class Scaled(nn.Module):
    """A parameter of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layer(x) * self.scale


class UsedOutside(nn.Module):
    """The weight of a layer is used where no hook sees it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.b(F.linear(torch.tanh(self.a(x)), self.a.weight))


class SharedEverywhere(nn.Module):
    """One vector as bias of two layers and weight of a norm; one matrix as two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.plain = nn.Conv2d(2, 4, 1)
        self.grouped = nn.Conv2d(4, 4, 1, groups=2, bias=False)
        self.out = nn.Linear(4, 3)
        self.norm.weight = self.first.bias
        self.grouped.weight = self.plain.weight

    def forward(self, x: Tensor) -> Tensor:  # [n, 2, h, w]
        y = torch.tanh(self.norm(self.first(x)) + self.plain(x))
        return self.out(self.grouped(y).mean((2, 3)))


class Conv1D(nn.Module):
    """Like that of transformers, which need not be installed: a linear layer with a weight [in, out]."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(size_out)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
        nn.GroupNorm(3, 6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=6),
        nn.Tanh(),
        nn.Conv2d(6, 5, 1, bias=False),
        nn.LayerNorm([5, 4, 9]),
        nn.Flatten(),
        nn.Linear(5 * 4 * 9, 3),
    )


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(4, 6, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 1), groups=2),
        nn.Tanh(),
        nn.Conv3d(6, 3, 2, dilation=(1, 1, 2)),
        nn.Flatten(),
        nn.Linear(3 * 4 * 1 * 3, 5),
        nn.RMSNorm(5, eps=0.1),
        nn.Linear(5, 3),
    )


def upsampling() -> nn.Module:
    """The last row of the first output is covered by no window: its output padding is a stride."""
    return nn.Sequential(
        nn.ConvTranspose2d(
            4, 6, (3, 2), stride=2, padding=1, output_padding=(2, 0), dilation=(3, 1), groups=2
        ),
        nn.Tanh(),
        nn.ConvTranspose2d(6, 2, 2, bias=False),
        nn.Flatten(),
        nn.Linear(2 * 12 * 7, 3),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


# name -> model, shape of one sample (None: indices), classes
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "mlp": (mlp, (5,), 0, 3),
    "sequence": (Sequence4d, (2, 3, 4), 0, 3),
    "convolutions": (convolutions, (4, 7, 7), 0, 3),
    "embedding": (lambda: Language(tied=False), (6,), 7, 7),
    "tied_embedding": (lambda: Language(tied=True), (6,), 7, 7),
    "two_tables": (TwoTables, (6,), 50, 3),
    "shared_everywhere": (SharedEverywhere, (2, 5, 4), 0, 3),
    "volumes": (volumes, (4, 4, 5, 3), 0, 3),
    "upsampling": (upsampling, (4, 3, 4), 0, 3),
}


def model_and_batch(
    name: str,
    samples: int = 5,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[nn.Module, Batch]:
    make, shape, words, classes = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        for p in model.parameters():  # norms start at ones and zeros
            p.data += 0.1 * torch.randn_like(p)
        inputs = torch.randint(words, (samples, *shape)) if words else torch.randn(samples, *shape)
        targets = torch.randint(classes, (samples,))
    inputs = inputs if words else inputs.to(dtype)
    return model.to(device, dtype), (inputs.to(device), targets.to(device))


loss_fn = F.cross_entropy
