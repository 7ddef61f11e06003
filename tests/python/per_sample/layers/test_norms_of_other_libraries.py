"""Norms that other libraries and models write themselves are known by what they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torchium
from torch import Tensor, nn
from torch.nn import functional as F
from torchium._capture.layers import LayerKind, layer_kind

WIDTH = 5


class RMSNorm(nn.Module):
    """As in Llama."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-2

    def normalised(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * self.normalised(hidden_states)


class ShiftedRMSNorm(RMSNorm):
    """As in Gemma."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        nn.init.zeros_(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.normalised(hidden_states) * (1.0 + self.weight)


class OwnLayerNorm(nn.LayerNorm):
    """As in timm: a subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class TimeFirstNorm(RMSNorm):
    """Its output is a view with dimensions in another order."""

    def normalised(self, x: Tensor) -> Tensor:
        return super().normalised(x.transpose(0, 1)).transpose(0, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.transpose(0, 1)).transpose(0, 1)


class LayerNorm2d(OwnLayerNorm):
    """As in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Moved(nn.Module):
    """The same by PyTorch's LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class Images(nn.Module):
    """A norm of channels among convolutions; the same output as a model of vectors."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, WIDTH, 1)
        self.norm = norm
        self.last = nn.Conv2d(WIDTH, 3, (2, 1))

    def forward(self, x: Tensor) -> Tensor:  # [n, 2, 4] -> [n, 4, 3]
        return self.last(self.norm(self.first(x.unsqueeze(1))).tanh()).squeeze(2).mT


class EpsOutsideNorm(RMSNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class GatedNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sigmoid()


class WholeNorm(RMSNorm):
    def normalised(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + self.variance_epsilon)


class NormWithState(RMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "llama": (RMSNorm, lambda: nn.RMSNorm(WIDTH, eps=1e-2)),
    "gemma": (ShiftedRMSNorm, lambda: nn.RMSNorm(WIDTH, eps=1e-2)),
    "timm": (
        lambda: OwnLayerNorm(WIDTH, eps=1e-2),
        lambda: nn.LayerNorm(WIDTH, eps=1e-2),
    ),
    "time_first": (TimeFirstNorm, lambda: nn.RMSNorm(WIDTH, eps=1e-2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PAIRS)
def test_kinds(name, dtype):
    own, known = (make().to(dtype) for make in PAIRS[name])
    torch.nn.init.zeros_(own.weight)  # what it computes does not depend on the values
    before, random = copy.deepcopy(own.state_dict()), torch.get_rng_state()
    assert layer_kind(own) is layer_kind(known)
    assert all(torch.equal(own.state_dict()[key], value) for key, value in before.items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    "make",
    [EpsOutsideNorm, GatedNorm, WholeNorm, NormWithState],
)
def test_modules_that_compute_something_else(make):
    module = make()
    assert layer_kind(module) is None
    assert all(float(buffer) == 0 for buffer in module.buffers())  # it has not run


def test_another_eps_or_forward_is_seen():
    norm = RMSNorm()
    assert layer_kind(norm) is LayerKind.RMS_NORM
    norm.forward = lambda x: x
    assert layer_kind(norm) is None
    del norm.forward
    norm.variance_epsilon = None
    assert layer_kind(norm) is None


def models(name: str) -> list[nn.Module]:
    """The same model with the norm of its own, and with that of PyTorch."""
    result: list[nn.Module] = []
    if name == "channels":
        for norm in (LayerNorm2d(WIDTH, eps=1e-2), Moved()):
            torch.manual_seed(0)
            result.append(Images(norm).double())
        return result
    for make in PAIRS[name]:
        torch.manual_seed(0)
        layers = [nn.Linear(4, WIDTH), make(), nn.Tanh(), nn.Linear(WIDTH, 3)]
        result.append(nn.Sequential(*layers).double())
    return result


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 2, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (6,), generator=generator)


def loss(model: nn.Module, seed: int) -> Tensor:
    x, y = batch(seed)
    return F.cross_entropy(model(x).mean(1), y)


OPTIMIZERS = {
    "natural_gradient": lambda model: torchium.NaturalGradient(model, lr=0.5, damping=1e-2),
    "conjugate_gradients": lambda model: torchium.NaturalGradient(
        model, lr=0.5, damping=1e-2, solver="cg", eps=1e-12
    ),
    "kfac": lambda model: torchium.KFAC(model, lr=0.1, TCov=1, TInv=2),
    "kfac_ggn": lambda model: torchium.KFAC(model, lr=0.1, TCov=1, TInv=2, fisher="ggn"),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", [*PAIRS, "channels"])
def test_optimizers_step_as_with_the_norm_of_torch(name, optimizer):
    own, known = models(name)
    shift = 1.0 if name == "gemma" else 0.0
    steppers = [OPTIMIZERS[optimizer](model) for model in (own, known)]
    for seed in range(4):
        for model, stepper in zip((own, known), steppers, strict=True):
            stepper.zero_grad()
            x, y = batch(seed)
            outputs = model(x).mean(1)
            if optimizer == "kfac_ggn":
                stepper.update_curvature(outputs, "cross_entropy")
            F.cross_entropy(outputs, y).backward()
            stepper.step()
    for (key, p), q in zip(own.named_parameters(), known.parameters(), strict=True):
        moved = p + (shift if key == "1.weight" else 0.0)
        torch.testing.assert_close(moved, q, rtol=1e-8, atol=1e-10)
    if optimizer == "kfac":
        assert len(steppers[0].report()["preconditioned"]) == len([*own.parameters()])


@pytest.mark.parametrize("name", [*PAIRS, "channels"])
def test_gradients_of_samples(name):
    own, known = models(name)
    for model in (own, known):
        with torchium.per_sample(model):
            loss(model, 0).backward()
    for p, q in zip(own.parameters(), known.parameters(), strict=True):
        torch.testing.assert_close(p.grad_sample, q.grad_sample)


# ---- norms with other arguments


class OptionallyGatedNorm(RMSNorm):
    """As in Mamba 2."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * F.silu(gate))


class GatedModel(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH)
        self.norm, self.last = OptionallyGatedNorm(), nn.Linear(WIDTH, 3)
        self.way = way
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.first(x), self.gate(x)
        if self.way == "positional":
            y = self.norm(y, gate)
        elif self.way == "keyword":
            y = self.norm(gate=gate, hidden_states=y)
        else:
            y = self.norm(gate=None, hidden_states=y) * gate
        return self.last(y)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).mean(1)


@pytest.mark.parametrize("way", ["positional", "keyword", "none"])
def test_a_gate_counts_in_gradients_of_samples(way):
    model = GatedModel(way)
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    rows = torchium.per_sample_gradients(model, lambda y, _: y.square().mean(), x, None)
    for i in range(4):
        expected = torch.autograd.grad(losses(model, x)[i], list(model.parameters()))
        for row, gradient in zip(rows.values(), expected, strict=True):
            torch.testing.assert_close(row[i], gradient)


def test_calls_with_a_gate_are_not_recorded():
    """So the weight of the norm is one that is used outside of layers."""
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    for way, is_recorded in (("positional", False), ("keyword", False), ("none", True)):
        model = GatedModel(way)
        kfac = torchium.KFAC(model)
        losses(model, x).mean().backward()
        if is_recorded:
            kfac.step()
        else:
            with pytest.warns(UserWarning, match=r"outside of its layer: norm\.weight"):
                kfac.step()
        assert (kfac.report()["parameters"]["norm.weight"][0] == "unit-wise") == is_recorded
        if is_recorded:
            continue
        model.zero_grad()
        optimizer = torchium.NaturalGradient(model)
        losses(model, x).mean().backward()
        with pytest.raises(ValueError, match=r"norm\.weight.* not come from its layer alone"):
            optimizer.step()
        with (
            pytest.raises(ValueError, match=r"norm\.weight' outside of its layer"),
            torchium.per_sample(model),
        ):
            losses(model, x).mean().backward()


def test_models_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    for cls in (llama.LlamaRMSNorm, t5.T5LayerNorm, gemma.GemmaRMSNorm):
        assert layer_kind(cls(WIDTH)) is LayerKind.RMS_NORM


def test_layers_of_timm():
    norms = pytest.importorskip("timm.layers.norm")
    assert layer_kind(norms.LayerNorm(WIDTH)) is LayerKind.LAYER_NORM
    assert layer_kind(norms.RmsNorm(WIDTH)) is LayerKind.RMS_NORM
    assert layer_kind(norms.LayerNorm2d(WIDTH)) is LayerKind.LAYER_NORM
    assert layer_kind(norms.SimpleNorm(WIDTH)) is None
