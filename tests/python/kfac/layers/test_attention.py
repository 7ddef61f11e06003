"""``nn.MultiheadAttention`` and transformer layers, against the same models of linear layers."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torchium
from curvature_losses import classify
from torch import Tensor, nn
from torch.optim import Optimizer

SAMPLES, POSITIONS, WIDTH, HEADS, CLASSES = 7, 5, 8, 2, 3

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "kfac": lambda model: torchium.KFAC(model, lr=0.1, TCov=1, TInv=1),
    "kfac_reduce": lambda model: torchium.KFAC(
        model, lr=0.1, TCov=1, TInv=1, weight_sharing="reduce"
    ),
    "kfac_ggn": lambda model: torchium.KFAC(model, lr=0.1, TCov=1, TInv=1, fisher="ggn"),
    "natural_gradient": lambda model: torchium.NaturalGradient(model, lr=0.1),
    "natural_gradient_ggn": lambda model: torchium.NaturalGradient(model, lr=0.1, fisher="ggn"),
}


def of_parameters(name: str) -> Callable[[nn.Module], Optimizer]:
    """The same optimizer, made from the parameters of a model."""

    def make(model: nn.Module) -> Optimizer:
        given = OPTIMIZERS[name](copy.deepcopy(model))
        options = {key: given.param_groups[0][key] for key in given.defaults}
        return type(given)(model.parameters(), **options)

    return make


class Attention(nn.Module):
    def __init__(self, batch_first: bool, need_weights: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.batch_first, self.need_weights = batch_first, need_weights
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        y, _ = self.attention(x, x, x, need_weights=self.need_weights)
        return self.head((y if self.batch_first else y.transpose(0, 1)).mean(1))


class OfLinearLayers(nn.Module):
    """The same function as an ``Attention``."""

    def __init__(self, model: Attention) -> None:
        super().__init__()
        attention = model.attention
        with_bias = attention.in_proj_bias is not None
        self.projection = nn.Linear(WIDTH, 3 * WIDTH, bias=with_bias)
        self.projection.weight = nn.Parameter(attention.in_proj_weight.detach().clone())
        if with_bias:
            self.projection.bias = nn.Parameter(attention.in_proj_bias.detach().clone())
        self.output = nn.Linear(WIDTH, WIDTH, bias=with_bias)
        self.output.load_state_dict(attention.out_proj.state_dict())
        self.head = copy.deepcopy(model.head)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.projection(x).chunk(3, -1)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.head(self.output((weights @ v).transpose(1, 2).flatten(2)).mean(1))


def train(
    model: nn.Module, make: Callable[[nn.Module], Optimizer], steps: int = 4
) -> tuple[Optimizer, list[Tensor]]:
    optimizer = make(model)
    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    for _ in range(steps):
        x = torch.randn(SAMPLES, POSITIONS, WIDTH, dtype=torch.float64, generator=generator)
        y = torch.randint(CLASSES, (SAMPLES,), generator=generator).to(device)
        x = x.to(next(model.parameters()))
        classify(model, optimizer, x, y)
    return optimizer, list(model.parameters())


def assert_trains_as(
    model: nn.Module,
    reference: nn.Module,
    make: Callable[[nn.Module], Optimizer],
    make_reference: Callable[[nn.Module], Optimizer] | None = None,
    tolerance: float = 1e-10,
) -> Optimizer:
    optimizer, params = train(model, make)
    _, expected = train(reference, make_reference or make)
    torch.testing.assert_close(params, expected, rtol=tolerance, atol=tolerance)
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_trains_as_its_linear_layers(
    name: str, batch_first: bool, need_weights: bool, device: torch.device
) -> None:
    model = Attention(batch_first, need_weights).double().to(device)
    reference = OfLinearLayers(model).double().to(device)
    optimizer = assert_trains_as(model, reference, OPTIMIZERS[name])
    if name.startswith("kfac"):
        assert optimizer.report()["fallback"] == []
        assert optimizer.report()["parameters"]["attention.in_proj_weight"] == (
            "factors",
            f"A {WIDTH + 1}, G {3 * WIDTH}",
        )


@pytest.mark.parametrize("name", ["kfac", "natural_gradient"])
def test_without_biases(name: str) -> None:
    model = Attention(batch_first=True, bias=False).double()
    reference = OfLinearLayers(model).double()
    assert_trains_as(model, reference, OPTIMIZERS[name])


class Encoder(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=batch_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.head(self.encoder(x).mean(1))
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_positions_may_come_first_in_a_transformer(name: str, device: torch.device) -> None:
    model = Encoder(batch_first=True).double().to(device)
    other = Encoder(batch_first=False).double().to(device)
    other.load_state_dict(model.state_dict())
    assert_trains_as(other, model, OPTIMIZERS[name], tolerance=1e-9)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_positions_may_come_first_in_a_transformer_known_by_its_parameters(name: str) -> None:
    model = Encoder(batch_first=False).double()
    other = copy.deepcopy(model)
    assert_trains_as(other, model, of_parameters(name), OPTIMIZERS[name], tolerance=1e-12)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_transformer_with_time_first_and_a_layer_within_another(name: str) -> None:
    model = Encoder(batch_first=True).double()
    other = Encoder(batch_first=False).double()
    other.load_state_dict(model.state_dict())
    for each in (model, other):  # as a library does that adds adapters
        layer = each.encoder.layers[0]
        layer.linear1 = nn.Sequential(layer.linear1)
    assert_trains_as(other, model, OPTIMIZERS[name], tolerance=1e-9)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_transformer_of_other_code_is_not_kept_alive() -> None:
    unused = nn.Parameter(torch.zeros(1))
    optimizer = torchium.KFAC([*nn.Linear(2, 2).parameters(), unused], lr=0.1)
    other = Encoder(batch_first=False)
    other(torch.randn(2, POSITIONS, WIDTH))
    layer = weakref.ref(other.encoder.layers[0].linear1)
    del other
    gc.collect()
    assert layer() is None
    assert optimizer.param_groups


class Projection(nn.Module):
    """Takes the place of an ``nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, *rest: object, **options: object) -> tuple[Tensor, None]:
        return self.linear(query), None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_transformer_layer_with_attention_of_another_class(name: str) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout=0.0, batch_first=True)
    layer.self_attn = Projection()

    class Pooled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(1)

    model = Pooled(layer, nn.Linear(WIDTH, CLASSES)).double()
    before = copy.deepcopy(list(model.parameters()))
    _, params = train(model, OPTIMIZERS[name])
    assert not any(map(torch.equal, before, params))


class OwnForward(nn.MultiheadAttention):
    """Calls its output projection as a module."""

    def forward(self, query: Tensor, *rest: object, **options: object) -> tuple[Tensor, None]:
        projected = nn.functional.linear(query, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected.chunk(3, -1)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_attention_with_a_forward_of_its_own(name: str) -> None:
    """Its output projection is a layer as others, and counts once."""
    model = Attention(batch_first=True).double()
    reference = OfLinearLayers(model).double()
    given = model.attention.state_dict()
    model.attention = OwnForward(WIDTH, HEADS, batch_first=True).double()
    model.attention.load_state_dict(given)
    frozen = (model.attention.in_proj_weight, model.attention.in_proj_bias)
    for param in (*frozen, *reference.projection.parameters()):
        param.requires_grad_(False)
    assert_trains_as(model, reference, OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["kfac", "natural_gradient"])
def test_several_optimizers_observe_one_attention(name: str) -> None:
    model = Attention(batch_first=True).double()
    reference = OfLinearLayers(model).double()
    make = OPTIMIZERS[name]
    others = [make(model), type(make(copy.deepcopy(model)))(model.attention.out_proj.parameters())]
    optimizer = make(model)
    others.append(make(model))
    assert_trains_as(model, reference, lambda _: optimizer, make)
    assert all(other.param_groups for other in others)


def test_a_later_hook_changes_the_batch_of_attention() -> None:
    model = Attention(batch_first=True).double()
    reference = OfLinearLayers(model).double()
    optimizers = [OPTIMIZERS["kfac"](each) for each in (model, reference)]
    model.attention.register_forward_pre_hook(lambda _, args: (args[0][:4],) * 3)
    x = torch.randn(8, POSITIONS, WIDTH, dtype=torch.float64)
    for outputs, optimizer in zip((model(x), reference(x[:4])), optimizers, strict=True):
        outputs.square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(
        list(model.parameters()), list(reference.parameters()), rtol=1e-12, atol=1e-12
    )


def test_an_interrupt_ends_the_observation() -> None:
    """No hook of PyTorch sees it; the next call of the attention does."""
    model = Attention(batch_first=True).double()
    optimizer = OPTIMIZERS["kfac"](model)

    def interrupt(*call: object) -> None:
        raise KeyboardInterrupt

    handle = model.attention.register_forward_pre_hook(interrupt)
    x = torch.randn(SAMPLES, POSITIONS, WIDTH, dtype=torch.float64)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    loss = model(x).square().mean()
    used = nn.functional.linear(x, model.attention.in_proj_weight)  # of a penalty, not of a layer
    (loss + used.square().mean()).backward()
    with pytest.warns(UserWarning, match="preconditions 4 of 6 parameters"):
        optimizer.step()


def test_attention_of_other_keys_falls_back_by_name() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            keys = x.flip(1)
            return self.head(self.attention(x, keys, keys)[0].mean(1))

    with pytest.warns(UserWarning, match="preconditions 4 of 6 parameters"):
        optimizer, _ = train(Cross().double(), OPTIMIZERS["kfac"])
    report = optimizer.report()
    assert report["fallback"] == ["attention.in_proj_weight", "attention.in_proj_bias"]
    assert report["parameters"]["attention.in_proj_weight"] == (
        "fallback",
        "used outside of its layer",
    )
    with pytest.raises(ValueError, match="does not come from its layer alone"):
        train(Cross().double(), OPTIMIZERS["natural_gradient"])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_keywords_in_the_first_pass_of_a_model_known_by_its_parameters(
    name: str, batch_first: bool
) -> None:
    class ByKeywords(Attention):
        def forward(self, x: Tensor) -> Tensor:
            x = x if self.batch_first else x.transpose(0, 1)
            y, _ = self.attention(query=x, key=x, value=x)
            return self.head((y if self.batch_first else y.transpose(0, 1)).mean(1))

    model = ByKeywords(batch_first).double()
    reference = OfLinearLayers(model).double()
    assert_trains_as(model, reference, of_parameters(name), OPTIMIZERS[name])


def test_three_weights_fall_back_and_are_refused() -> None:
    class OfOtherWidths(Attention):
        def __init__(self) -> None:
            super().__init__(batch_first=True)
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=4, vdim=6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x[..., :4], x[..., :6])[0].mean(1))

    with pytest.warns(
        UserWarning,
        match=r"4 \(MultiheadAttention has kdim or vdim, and so weights outside of modules: ",
    ):
        train(OfOtherWidths().double(), OPTIMIZERS["kfac"])
    model = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS, kdim=4, vdim=6))
    with pytest.raises(ValueError, match=r"MultiheadAttention.*kdim or vdim"):
        torchium.NaturalGradient(model, lr=0.1)


def test_an_error_in_the_forward_pass_ends_the_observation() -> None:
    model = Attention(batch_first=True).double()
    reference = OfLinearLayers(model).double()
    optimizer = OPTIMIZERS["kfac"](model)
    for _ in range(3):
        with pytest.raises(AssertionError, match="was expecting embedding dimension"):
            model(torch.randn(2, 3, WIDTH + 1, dtype=torch.float64))
    assert optimizer.param_groups
    assert_trains_as(model, reference, lambda _: optimizer, OPTIMIZERS["kfac"])


@pytest.mark.parametrize("name", ["kfac", "natural_gradient"])
def test_only_the_output_projection_is_trained(name: str) -> None:
    model = Attention(batch_first=True).double()
    reference = OfLinearLayers(model).double()
    for frozen in (model.attention.in_proj_weight, model.attention.in_proj_bias):
        frozen.requires_grad_(False)
    for frozen in reference.projection.parameters():
        frozen.requires_grad_(False)

    def of_trained(model: nn.Module) -> Optimizer:
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        optimizer = type(OPTIMIZERS[name](copy.deepcopy(model)))(trained, lr=0.1)
        model(torch.randn(2, POSITIONS, WIDTH, dtype=torch.float64))  # shows the modules
        return optimizer

    assert_trains_as(model, reference, of_trained)


def test_recomputed_attention_is_recorded_once() -> None:
    class Checkpointed(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    model = Attention(batch_first=True).double()
    other = Checkpointed(batch_first=True).double()
    other.load_state_dict(model.state_dict())
    assert_trains_as(other, model, OPTIMIZERS["kfac"], tolerance=1e-12)


@pytest.mark.parametrize("name", ["kfac", "natural_gradient"])
def test_recomputed_attention_alone(name: str) -> None:
    """The recomputation stops at the last tensor that the forward pass has saved."""

    class Checkpointed(Attention):
        def forward(self, x: Tensor) -> Tensor:
            y, _ = torch.utils.checkpoint.checkpoint(self.attention, x, x, x, use_reentrant=False)
            return self.head(y.mean(1))

    model = Attention(batch_first=True).double()
    other = Checkpointed(batch_first=True).double()
    other.load_state_dict(model.state_dict())
    assert_trains_as(other, model, OPTIMIZERS[name], tolerance=1e-12)


def test_hooks_of_a_copied_model_remove_themselves() -> None:
    model = Attention(batch_first=True).double()
    optimizer = OPTIMIZERS["kfac"](model)
    twin = copy.deepcopy(model)
    twin(torch.randn(2, POSITIONS, WIDTH, dtype=torch.float64))
    assert not twin.attention._forward_pre_hooks
    assert not twin.attention._forward_hooks
    assert not twin.attention._forward_hooks_always_called
    assert model.attention._forward_pre_hooks
    del optimizer
    assert not model.attention._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", ["kfac", "natural_gradient"])
def test_a_copy_knows_layers_with_time_first(name: str) -> None:
    model = Encoder(batch_first=False).double()
    optimizer = OPTIMIZERS[name](model)
    twin, of_twin = copy.deepcopy((model, optimizer))
    assert_trains_as(twin, model, lambda _: of_twin, lambda _: optimizer, tolerance=0.0)


def test_a_copy_knows_attention_by_its_output_projection() -> None:
    model = Attention(batch_first=True).double()
    optimizer = torchium.KFAC([*model.attention.out_proj.parameters()], lr=0.1, TCov=1, TInv=1)
    train(model, lambda _: optimizer)
    twin, of_twin = copy.deepcopy((model, optimizer))
    assert_trains_as(twin, model, lambda _: of_twin, lambda _: optimizer, tolerance=0.0)


@pytest.mark.cuda
@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_under_autocast_on_a_device(batch_first: bool) -> None:
    model = Attention(batch_first).cuda()
    reference = OfLinearLayers(model).cuda()
    factors = []
    for each in (model, reference):
        optimizer = torchium.KFAC(each, lr=0.0, TCov=1, TInv=1)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 32, WIDTH, generator=generator).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            outputs = each(x)
        outputs.float().square().mean().backward()
        optimizer.step()
        weights = [p for p in each.parameters() if p.dim() == 2]
        factors.append([optimizer.state[p][key] for p in weights for key in ("A", "G")])
    for own, expected in zip(*factors, strict=True):
        assert (own - expected).norm() < 2e-2 * expected.norm()  # of gradients in bfloat16


def test_an_error_of_another_hook_leaves_the_observation_alone() -> None:
    model = Attention(batch_first=True).double()

    def raises(*call: object) -> None:
        raise KeyError("of another hook")

    handle = model.attention.register_forward_pre_hook(raises)
    optimizer = OPTIMIZERS["kfac"](model)
    with pytest.raises(KeyError, match="of another hook"):
        model(torch.randn(2, POSITIONS, WIDTH, dtype=torch.float64))
    handle.remove()
    reference = OfLinearLayers(model).double()
    assert_trains_as(model, reference, lambda _: optimizer, OPTIMIZERS["kfac"])


@pytest.mark.parametrize("name", ["kfac", "natural_gradient"])
def test_attention_of_a_compiled_model(name: str) -> None:
    model = Attention(batch_first=True).double()
    other = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](other)
    compiled = torch.compile(other, backend="aot_eager")
    assert_trains_as(compiled, model, lambda _: optimizer, OPTIMIZERS[name], tolerance=1e-12)
