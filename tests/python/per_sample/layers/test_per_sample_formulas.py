"""Per-sample gradients of layers by explicit formulas, torchium's own and registered ones."""

from __future__ import annotations

import pytest
import torch
import torchium
from reference.per_sample import per_sample_gradients as reference_gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torchium import gradients
from torchium._per_sample import formulas
from torchium._per_sample import per_sample as implementation


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch) -> None:
    """Formulas are used, and registrations of a test end with it."""

    def fail(*args):
        pytest.fail("a formula was not used")

    monkeypatch.setattr(implementation, "_by_vmap", fail)
    monkeypatch.setattr(implementation, "_one_by_one", fail)
    monkeypatch.setattr(formulas, "_registered", {})


class Followed(nn.Module):
    """Runs under vmap, because its forward is not known."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.flatten(1).square().sum(1) * target).mean()


def assert_all_right(model: nn.Module, x: Tensor, rtol: float = 1e-9) -> None:
    """All five functions and the block, against vmap(grad)."""
    y = torch.rand(len(x), dtype=x.dtype, device=x.device)
    expected = reference_gradients(model, squares, x, y)
    J = torch.cat([rows.flatten(1) for rows in expected.values()], 1).double()
    close = {"rtol": rtol, "atol": rtol}
    for form in (model, Followed(model)):
        found = torchium.per_sample_gradients(form, squares, x, y)
        for rows, of_reference in zip(found.values(), expected.values(), strict=True):
            torch.testing.assert_close(rows, of_reference, **close)
        norms = gradients.per_sample_norms(form, squares, x, y)
        torch.testing.assert_close(norms.double(), J.norm(dim=1), **close)
        K = gradients.gram(form, squares, x, y)
        torch.testing.assert_close(K, J @ J.T, **close)
        vectors = {n: torch.randn_like(p) for n, p in form.named_parameters()}
        dots = gradients.jvp_dots(form, squares, x, y, vectors)
        v = torch.cat([value.flatten() for value in vectors.values()]).double()
        torch.testing.assert_close(dots.double(), J @ v, **close)
        max_norm = J.norm(dim=1).median().item()
        gradients.clip_and_accumulate(form, squares, x, y, max_norm)
        found = torch.cat([p.grad.flatten() for p in form.parameters()]).double()
        torch.testing.assert_close(found, (max_norm / J.norm(dim=1)).clamp(max=1) @ J, **close)
        form.zero_grad()
        with gradients.per_sample(form):
            squares(form(x), y).backward()
        for p, of_reference in zip(form.parameters(), expected.values(), strict=True):
            torch.testing.assert_close(p.grad_sample, of_reference, **close)
        form.zero_grad()


CONVOLUTIONS = {
    "plain": {},
    "stride": {"stride": 2, "padding": 1},
    "dilation": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2, "stride": 2},
    "all": {"groups": 2, "stride": 2, "padding": 1, "dilation": 2, "bias": False},
}


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("dims", [1, 3])
def test_convolutions(dims, options, device):
    torch.manual_seed(0)
    cls = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    layer = cls(4, 6, 2, **CONVOLUTIONS[options])
    x = torch.randn(3, 4, *range(5, 5 + dims)).double().to(device)
    assert_all_right(nn.Sequential(layer, nn.Tanh()).double().to(device), x)


@pytest.mark.parametrize("padding", ["same", "valid", 1])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_paddings(padding, mode):
    torch.manual_seed(0)
    layer = nn.Conv1d(2, 3, 4, padding=padding, padding_mode=mode)
    assert_all_right(nn.Sequential(layer, nn.Tanh()).double(), torch.randn(3, 2, 7).double())


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions(dims, options, device):
    torch.manual_seed(0)
    cls = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
    settings = CONVOLUTIONS[options]
    layer = cls(4, 6, 3, output_padding=int(settings.get("stride", 1) > 1), **settings)
    x = torch.randn(3, 4, *range(4, 4 + dims)).double().to(device)
    assert_all_right(nn.Sequential(layer, nn.Tanh()).double().to(device), x)


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 4), (3, 2, 5, 4)])
@pytest.mark.parametrize("normalized", [1, 2])
@pytest.mark.parametrize("eps", [None, 0.1])
def test_rms_norm(shape, normalized, eps, device):
    if len(shape) <= normalized:
        return
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(shape[-normalized:], eps=eps), nn.Linear(4, 3), nn.Tanh())
    model = model.double().to(device)
    nn.init.normal_(model[0].weight)
    assert_all_right(model, torch.randn(shape).double().to(device))


def test_the_transposed_linear_layer_of_transformers(device):
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(5, 4), nn.Tanh(), Conv1D(3, 5)).double().to(device)
    for shape in ((3, 4), (3, 2, 4)):
        assert_all_right(model, torch.randn(shape).double().to(device))


def test_low_precision_is_summed_in_float32():
    torch.manual_seed(0)
    layer = nn.Conv1d(2, 2, 1, bias=False).bfloat16()
    x = torch.full((1, 2, 4096), 1.0, dtype=torch.bfloat16)
    rows = torchium.per_sample_gradients(layer, lambda y, t: y.float().sum(), x, torch.zeros(1))
    assert (rows["weight"] == 4096).all()


# ---- registered layers


class Scale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor, self.shift = nn.Parameter(torch.randn(features)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x + self.shift


def scale_formula(layer: Scale, input: Tensor, output_gradient: Tensor) -> dict[str, Tensor]:
    return {"factor": input * output_gradient, "shift": output_gradient.sum(1, keepdim=True)}


class Named(nn.Module):
    """With the names of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + self.bias


def test_a_registered_layer():
    @gradients.register_layer(Named)
    def formula(layer, input, output_gradient):
        assert not torch.is_grad_enabled()
        assert input.shape == output_gradient.shape == (3, 4)
        return {"weight": input * output_gradient, "bias": output_gradient}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), Named(), nn.Tanh()).double()
    assert_all_right(model, torch.randn(3, 5).double())
    model[1].bias.requires_grad_(False)
    rows = torchium.per_sample_gradients(
        model, squares, torch.randn(3, 5).double(), torch.ones(3).double()
    )
    assert list(rows) == ["0.weight", "0.bias", "1.weight"]


def test_names_of_parameters_are_free():
    gradients.register_layer(Scale, scale_formula)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), Scale(4)).double()
    x, y = torch.randn(3, 5).double(), torch.ones(3).double()
    expected = reference_gradients(model, squares, x, y)
    torch.testing.assert_close(torchium.per_sample_gradients(model, squares, x, y), expected)
    assert_all_right(model, x)
    assert_all_right(nn.Sequential(model[1], nn.Tanh(), model[1]), torch.randn(3, 4).double())
    model[1].factor.requires_grad_(False)
    with gradients.per_sample(model):
        squares(model(x), y).backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad_sample, expected[name])


def test_what_a_block_cannot_take_of_registered_layers():
    class Three(Scale):
        def __init__(self) -> None:
            super().__init__(4)
            self.third = nn.Parameter(torch.ones(1))

    class Scalar(Scale):
        def __init__(self) -> None:
            super().__init__(4)
            self.shift = nn.Parameter(torch.tensor(1.0))

    gradients.register_layer(Scale, scale_formula)

    class Parent(Three):
        def __init__(self) -> None:
            super().__init__()
            self.activation = nn.Tanh()

    three = (
        r"3 parameters, .*at most two of a registered layer; split it into layers of at most two"
    )
    scalar = r"a parameter 'shift' without dimensions; give it the shape \[1\]"
    for make, reason in ((Three, three), (Parent, three), (Scalar, scalar)):
        model = nn.Sequential(nn.Linear(5, 4), make())
        message = rf"model\.1 \({make.__name__}\) has {reason}"
        with pytest.raises(ValueError, match=message) as raised, gradients.per_sample(model):
            pass
        assert "register_layer" not in str(raised.value)
        model[1].requires_grad_(False)
        with gradients.per_sample(model):
            squares(model(torch.randn(3, 5)), torch.ones(3)).backward()


class OddInputs(Scale):
    def forward(self, *inputs: Tensor | list[Tensor], scale: float = 1.0) -> Tensor:
        tensors = [t for each in inputs for t in (each if isinstance(each, list) else [each])]
        return self.factor * sum(tensors, torch.zeros(4)) * scale + self.shift


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: layer(),
        lambda layer, x: layer(scale=2.0),
        lambda layer, x: layer([x, x.sin()]),
        lambda layer, x: layer(x, x.sin()),
    ],
)
def test_a_formula_is_for_calls_with_one_tensor(call):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.odd = nn.Linear(5, 4), OddInputs(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x.tanh() + call(self.odd, x)

    gradients.register_layer(OddInputs, scale_formula)
    model = Model()
    x, y = torch.randn(3, 5), torch.ones(3)
    with pytest.raises(pytest.fail.Exception, match="a formula was not used"):
        torchium.per_sample_gradients(model, squares, x, y)
    with (
        pytest.raises(ValueError, match=r"'odd.*in a call of it with other inputs than one tensor"),
        gradients.per_sample(model),
    ):
        squares(model(x), y).backward()


def test_a_subclass_with_a_forward_of_its_own_is_another_layer():
    class Child(Scale):
        pass

    class Other(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.square())

    gradients.register_layer(Scale, scale_formula)
    assert formulas.formula_of(Child(3)) is scale_formula
    assert formulas.formula_of(Other(3)) is None
    assert formulas.formula_of(nn.Linear(3, 3)) is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({}, "returned no tensor 'factor'"),
        (None, "returned no tensor 'factor'"),
        ({"factor": torch.zeros(3, 5), "shift": torch.zeros(3, 1)}, r"returned shape \(3, 5\)"),
        ({"factor": torch.zeros(3, 4).long()}, r"returned type torch.int64"),
    ],
)
def test_wrong_results_of_a_formula(result, message):
    gradients.register_layer(Scale, lambda layer, input, output_gradient: result)
    with pytest.raises(ValueError, match=f"registered for Scale {message}"):
        torchium.per_sample_gradients(Scale(4), squares, torch.randn(3, 4), torch.ones(3))


def test_wrong_registrations():
    with pytest.raises(ValueError, match=r"module_class is 3; it must be a subclass"):
        gradients.register_layer(3, scale_formula)
    with pytest.raises(ValueError, match="module_class is Linear of PyTorch; register a subclass"):
        gradients.register_layer(nn.Linear, scale_formula)
    with pytest.raises(ValueError, match="formula is 'x'; it must be a function of layer"):
        gradients.register_layer(Scale, "x")


def test_losses_of_classes_after_a_convolution():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randn(4, 2, 5).double(), torch.randint(3, (4,))
    torch.testing.assert_close(
        torchium.per_sample_gradients(model, F.cross_entropy, x, y),
        reference_gradients(model, F.cross_entropy, x, y),
    )


@pytest.mark.parametrize("cls", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("padding", [0, 2])
def test_padding_may_be_set_later(cls, padding):
    dimensions = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[cls]
    layer = cls(2, 3, 3, padding=1).double()
    layer.padding = (padding,) * dimensions
    x = torch.randn(4, 2, *[6] * dimensions, dtype=torch.float64)

    def loss_fn(outputs, targets):
        return outputs.square().flatten(1).sum(1).mean()

    rows = torchium.gradients.per_sample_gradients(layer, loss_fn, x, x)
    for i in range(4):
        expected = torch.autograd.grad(loss_fn(layer(x[i : i + 1]), x), list(layer.parameters()))
        for row, gradient in zip(rows.values(), expected, strict=True):
            torch.testing.assert_close(row[i], gradient)
