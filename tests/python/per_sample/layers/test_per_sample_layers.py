"""torchium.per_sample_gradients in one pass over the batch: the supported models, and the results."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torchium
from captured_layers import MODELS, Scaled, UsedOutside, loss_fn, model_and_batch
from optimizer_cases import assert_same, snapshot
from reference.per_sample import per_sample_gradients as reference_gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint
from torchium._per_sample import per_sample as implementation


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """The names of the methods used."""
    taken: list[str] = []

    def watched(name: str):
        original = getattr(implementation, name)

        def call(*args):
            result = original(*args)
            if result is not None:
                taken.append(name)
            return result

        return call

    for name in ("layer_calls", "_by_vmap", "_one_by_one"):
        monkeypatch.setattr(implementation, name, watched(name))
    return taken


ONE_PASS, BY_VMAP, ONE_BY_ONE = ["layer_calls"], ["_by_vmap"], ["_one_by_one"]


def assert_right(model: nn.Module, inputs: Tensor, targets: Tensor, loss=loss_fn) -> None:
    expected = reference_gradients(model, loss, inputs, targets)
    gradients = torchium.per_sample_gradients(model, loss, inputs, targets)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == expected[name].dtype
        assert not gradient.requires_grad
        torch.testing.assert_close(gradient, expected[name], msg=name)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"two_tables"}))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_supported_models_take_one_pass(name, dtype, device, passes):
    model, batch = model_and_batch(name, samples=6, dtype=dtype, device=device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    assert_right(model, *batch)
    assert passes == ONE_PASS


def test_the_static_method_and_the_old_name_are_the_function():
    model, batch = model_and_batch("mlp")
    expected = torchium.per_sample_gradients(model, loss_fn, *batch)
    for cls in (torchium.NaturalGradient, torchium.utils.cuda_kernels.CUDAGradientOps):
        name = "per_sample_gradients"
        function = getattr(cls, name, None) or cls.compute_per_sample_gradients
        assert_same(function(model, loss_fn, *batch), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["cross_entropy", "mse", "by_hand"])
def test_losses_of_single_samples(reduction, kind, passes):
    """Each sample is a batch of one, so means and sums are the same."""
    model, (x, y) = model_and_batch("mlp")
    losses = {
        "cross_entropy": (nn.CrossEntropyLoss(reduction=reduction), y),
        "mse": (
            lambda o, t: F.mse_loss(o, t, reduction="none").mean(1).sum(),
            torch.randn(5, 3).double(),
        ),
        "by_hand": (lambda o, t: o.gather(1, t[:, None]).exp().log1p(), y),
    }
    loss, targets = losses[kind]
    assert_right(model, x, targets, loss)
    assert passes == ONE_PASS


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x):
        return {"a": self.a(x), "b": (self.b(x), x)}


def test_models_with_several_outputs(passes):
    model = Several().double()

    def loss(output, target):
        assert output["a"].shape == (1, 3)
        return (output["a"].square().sum() * output["b"][0].mean() - target).square().mean()

    assert_right(model, torch.randn(5, 4).double(), torch.randn(5).double(), loss)
    assert passes == ONE_PASS


class InPlaceSequences(nn.Module):
    """A linear layer on sequences returns a view."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3), nn.SiLU(inplace=True)
        )

    def forward(self, x):
        return self.layers(x).sum(1)


def test_activations_in_place_on_views(passes):
    model = InPlaceSequences().double()
    assert_right(model, torch.randn(5, 3, 4).double(), torch.randint(3, (5,)))
    assert passes == ONE_PASS


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["same", "valid", (1, 2)])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4)], ids=str)
def test_every_padding_of_a_convolution(padding_mode, padding, kernel, passes):
    layer = nn.Conv2d(2, 3, kernel, padding=padding, padding_mode=padding_mode)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(4, 2, 5, 6).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uneven sides are padded in a copy, as torch warns
        model(x)
        assert_right(model, x, torch.randint(3, (4,)))
    assert passes == ONE_PASS


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.out = nn.Linear(5, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return self.out(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))


def test_checkpointed_models(passes):
    model = Checkpointed(use_reentrant=False).double()
    with pytest.warns(UserWarning, match="one by one, which is slow for a batch: in Checkpointed"):
        assert_right(model, torch.randn(5, 4).double(), torch.randint(3, (5,)))
    assert passes == ONE_BY_ONE


@pytest.mark.parametrize(
    "function",
    [
        torchium.per_sample_gradients,
        torchium.gradients.per_sample_norms,
        lambda *args: torchium.gradients.clip_and_accumulate(*args, max_norm=1.0),
    ],
    ids=["rows", "norms", "clipped_sum"],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_reentrant_checkpoints_are_refused(function, is_first):
    model, x = Checkpointed(use_reentrant=True), torch.randn(5, 4)
    if is_first:
        x.requires_grad_()  # else the segment has no gradients in backward() either
    else:
        model = nn.Sequential(nn.Linear(4, 4), model)
    with pytest.raises(ValueError, match=r"per-sample gradients: .* pass use_reentrant=False"):
        function(model, F.cross_entropy, x, torch.randint(3, (5,)))
    assert all(p.grad is None for p in model.parameters())


def test_layers_that_the_loss_does_not_need_have_zero_rows(passes):
    model = Several().double()
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    assert_right(model, x, y, lambda output, target: F.cross_entropy(output["a"], target))
    assert passes == ONE_PASS


def test_frozen_parameters_are_left_out(passes):
    model, batch = model_and_batch("mlp")
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    assert_right(model, *batch)
    assert passes == ONE_PASS


def test_a_model_with_nothing_to_train_has_no_gradients():
    model, batch = model_and_batch("mlp")
    assert torchium.per_sample_gradients(model.requires_grad_(False), loss_fn, *batch) == {}


def test_one_sample_and_integer_inputs(passes):
    model, (x, y) = model_and_batch("embedding")
    assert_right(model, x[:1], y[:1])
    assert passes == ONE_PASS


# ---- models that need the slow method


class Regularized(UsedOutside):
    def forward(self, x):
        return self.b(self.a(x)) + self.b.weight.square().mean()


class LearnedInput(nn.Module):
    """The input of a layer is another layer's parameter."""

    def __init__(self):
        super().__init__()
        self.query, self.layer = nn.Linear(4, 5, bias=False), nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(self.query.weight[: len(x)] * 1.0) * 0 + self.layer(x)


class HyperNetwork(nn.Module):
    """Another layer computes the weight of a layer."""

    def __init__(self):
        super().__init__()
        self.of_weight, self.layer = nn.Linear(12, 12), nn.Linear(4, 3)
        del self.layer.weight

    def forward(self, x):
        self.layer.weight = self.of_weight(torch.ones(12, dtype=x.dtype)).view(3, 4)
        return self.layer(x)


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input.square())


SLOW = {
    "parameter": (Scaled, (4,)),
    "used_outside": (UsedOutside, (4,)),
    "regularized": (Regularized, (4,)),
    "fed_by_a_parameter": (LearnedInput, (4,)),
    "own_forward": (lambda: OwnForward(4, 3), (4,)),
    "learned_slope": (lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU()), (4,)),
    "weight_norm": (lambda: weight_norm(nn.Linear(4, 3)), (4,)),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    "hyper_network": (HyperNetwork, (4,)),
}


@pytest.mark.parametrize("kind", SLOW)
@pytest.mark.parametrize("samples", [1, 3])
def test_other_models_are_right_too(kind, samples, passes):
    make, shape = SLOW[kind]
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(samples, *shape).double()
    assert_right(model, x, torch.randint(3, (samples,)))
    assert passes == BY_VMAP


# ---- purity


def test_attached_optimizers_hooks_and_gradients_see_nothing(passes):
    model, batch = model_and_batch("convolutions", dtype=torch.float32)
    x, y = batch
    optimizers = [torchium.KFAC(model), torchium.NaturalGradient(model.parameters())]
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
        p.register_hook(lambda gradient: pytest.fail("a gradient has reached a parameter"))
    hooks = [len(m._forward_hooks) for m in model.modules()]
    before = [snapshot(optimizer) for optimizer in optimizers]
    states = torch.get_rng_state()
    with torch.no_grad():
        gradients = torchium.per_sample_gradients(model, loss_fn, x, y)
    assert passes == ONE_PASS
    assert not any(g.requires_grad for g in gradients.values())
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert_same([snapshot(optimizer) for optimizer in optimizers], before)
    assert all((p.grad == 3.0).all() for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), states)
    plan = optimizers[0]._plan  # None: no layer has asked for one
    assert plan is None or not plan.core.recorded()
    assert not optimizers[1]._capture.calls()


def test_hooks_go_when_the_model_raises():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torchium.per_sample_gradients(model, loss_fn, torch.randn(2, 4), torch.zeros(2).long())
    assert not any(m._forward_hooks for m in model.modules())


def test_random_numbers_of_the_loss_are_refused():
    model, (x, y) = model_and_batch("mlp")
    state = torch.get_rng_state()

    def loss(output, target):
        return F.cross_entropy(output + torch.randn_like(output), target)

    with pytest.raises(ValueError, match="draws random numbers"):
        torchium.per_sample_gradients(model, loss, x, y)
    assert torch.equal(torch.get_rng_state(), state)


# ---- another implementation


def random_network(seed: int) -> tuple[nn.Module, Tensor]:
    """Some layers of random widths, and inputs for them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    samples = draw(1, 6)
    layers: list[nn.Module] = []
    if seed % 2:
        groups, width = draw(1, 2), 2 * draw(1, 3)
        layers += [
            nn.Conv2d(2, width, draw(1, 3), stride=draw(1, 2), padding=draw(0, 2), groups=groups),
            nn.GroupNorm(2, width),
            nn.ReLU(),
            nn.Conv2d(width, 4, 2, dilation=draw(1, 2), bias=bool(draw(0, 1))),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        ]
        inputs = torch.randn(samples, 2, 7, 7, generator=generator)
        features = 16
    else:
        words, features = draw(3, 9), draw(2, 6)
        layers += [nn.Embedding(words, features), nn.LayerNorm(features), nn.Linear(features, 5)]
        layers += [nn.Tanh(), nn.Flatten()]
        length = draw(1, 4)
        inputs = torch.randint(words, (samples, length), generator=generator)
        features = 5 * length
    for _ in range(draw(0, 2)):
        width = draw(1, 7)
        layers += [nn.Linear(features, width, bias=bool(draw(0, 1))), nn.Tanh()]
        features = width
    layers.append(nn.Linear(features, 3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in layers:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return nn.Sequential(*layers).double(), inputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(20))
def test_opacus_agrees_on_random_networks(seed, passes):
    grad_sample = pytest.importorskip("opacus.grad_sample")
    model, inputs = random_network(seed)
    targets = torch.randint(3, (len(inputs),))
    gradients = torchium.per_sample_gradients(model, F.cross_entropy, inputs, targets)
    assert passes == ONE_PASS
    other = grad_sample.GradSampleModule(copy.deepcopy(model), loss_reduction="mean")
    F.cross_entropy(other(inputs), targets).backward()
    for name, p in other._module.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad_sample, rtol=1e-9, atol=1e-10, msg=name)


def test_every_sample_starts_with_the_present_buffers():
    """Spectral norm in training mode takes one power iteration step per pass."""
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Linear(5, 3)).double()
    x, y = torch.randn(3, 4).double(), torch.randint(3, (3,))
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    rows = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    assert_same(dict(model.named_buffers()), buffers)
    for i in range(3):
        fresh = copy.deepcopy(model)
        F.cross_entropy(fresh(x[i : i + 1]), y[i : i + 1]).backward()
        assert any(not torch.equal(b, buffers[n]) for n, b in fresh.named_buffers())
        for name, parameter in fresh.named_parameters():
            torch.testing.assert_close(rows[name][i], parameter.grad)


# ---- losses that use parameters of the model


class LossOfLayer(nn.Module):
    """Holds a layer of the model, as the loss of an adaptive softmax does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + self.layer.weight.norm() * output.square().sum()


def losses_with_parameters(model: nn.Module) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    def penalty(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 0.1 * sum(
            p.square().sum() for p in model.parameters()
        )

    def forward_again(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + model(torch.ones_like(output[:, :1])).sum()

    return {"penalty": penalty, "module": LossOfLayer(model[-1]), "forward": forward_again}


def small_model(way: str) -> nn.Module:
    inner = {"one_pass": nn.Tanh, "vmap": nn.PReLU, "one_by_one": lambda: FirstOutput(nn.GRU(3, 3))}
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 3), inner[way](), nn.Linear(3, 3)).double()


class FirstOutput(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


@pytest.mark.filterwarnings("ignore:per_sample_gradients takes the samples one by one")
@pytest.mark.parametrize("way", ["one_pass", "vmap", "one_by_one"])
@pytest.mark.parametrize("kind", ["penalty", "module", "forward"])
def test_losses_may_use_parameters_of_the_model(way, kind):
    model = small_model(way)
    x, y = torch.randn(4, 1).double(), torch.randint(3, (4,))
    loss = losses_with_parameters(model)[kind]
    gradients = torchium.per_sample_gradients(model, loss, x, y)
    for i in range(len(x)):
        row = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), [*model.parameters()])
        for gradient, expected in zip(gradients.values(), row, strict=True):
            torch.testing.assert_close(gradient[i], expected)
    assert all(isinstance(p, nn.Parameter) for m in model.modules() for p in m._parameters.values())


@pytest.mark.filterwarnings("ignore:per_sample_gradients takes the samples one by one")
@pytest.mark.parametrize("way", ["one_pass", "vmap", "one_by_one"])
def test_a_kept_reference_to_a_parameter_is_refused_by_name(way):
    model = small_model(way)
    weight = model[2].weight

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + weight.square().sum()

    x, y = torch.randn(4, 1).double(), torch.randint(3, (4,))
    with pytest.raises(ValueError, match=r"reference to the parameter '2\.weight' that loss_fn"):
        torchium.per_sample_gradients(model, loss, x, y)
    # A constant has no gradient to miss.
    kept = weight
    weight = weight.detach()
    with_constant = torchium.per_sample_gradients(model, loss, x, y)
    without = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    assert_same(with_constant, without)
    assert kept.grad is None
