"""Models that are called with the whole batch, and those that must not be."""

from __future__ import annotations

import gc

import pytest
import torch
import torchium
from reference.per_sample import per_sample_gradients as reference_gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode
from torchium._per_sample import layers as implementation
from torchium._per_sample import samplewise


@pytest.fixture(autouse=True)
def no_hook_of_earlier_tests() -> None:
    """A global hook would be noticed here: one of an optimizer that an earlier traceback still holds."""
    if nn_module._has_any_global_hook():
        gc.collect()
    assert not nn_module._has_any_global_hook()


@pytest.fixture
def passes(monkeypatch) -> list[bool]:
    """For each evaluation whether the model was called with the whole batch."""
    taken: list[bool] = []
    original = implementation._calls_of_batch

    def call(*args):
        result = original(*args)
        taken.append(result is not None)
        return result

    monkeypatch.setattr(implementation, "_calls_of_batch", call)
    return taken


def assert_right(model, loss_fn, inputs, targets, **tolerances) -> None:
    gradients = torchium.per_sample_gradients(model, loss_fn, inputs, targets)
    expected = reference_gradients(model, loss_fn, inputs, targets)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], msg=name, **tolerances)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 2, -100, 1])


MODULES = {
    nn.Dropout: lambda: nn.Dropout().eval(),
    nn.Flatten: lambda: nn.Flatten(),
    nn.Linear: lambda: nn.Linear(3, 3),
    nn.LayerNorm: lambda: nn.LayerNorm(3),
    nn.RMSNorm: lambda: nn.RMSNorm(3),
    nn.GroupNorm: lambda: nn.GroupNorm(1, 3),
    **{cls: lambda cls=cls: cls(3, 3, 1) for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **{cls: lambda cls=cls: cls(2) for cls in samplewise._RULES if "Pool" in cls.__name__},
}


@pytest.mark.parametrize("cls", samplewise._RULES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dims", [1, 2, 3, 4, 5])
def test_a_rule_holds_for_every_number_of_dimensions(cls, dims):
    """A module that keeps rows apart returns the same row whatever the others are."""
    torch.manual_seed(0)
    x = torch.randint(3, [3] * dims) if cls is nn.Embedding else torch.randn([3] * dims)
    module = nn.Embedding(3, 2) if cls is nn.Embedding else MODULES.get(cls, cls)()
    if not samplewise.is_samplewise(module, x):
        return
    try:
        whole = module(x)
    except (RuntimeError, ValueError, AssertionError, IndexError):
        return  # no such input
    for i in range(3):
        torch.testing.assert_close(whole[i : i + 1], module(x[i : i + 1]))


def test_too_few_dimensions_make_rows_the_channels_of_a_sample():
    image = torch.randn(3, 5, 5)
    assert not samplewise.is_samplewise(nn.Conv2d(3, 3, 1), image)
    assert not samplewise.is_samplewise(nn.LayerNorm([3, 5, 5]), image)
    assert not samplewise.is_samplewise(nn.Flatten(0), image)
    assert not samplewise.is_samplewise(nn.Dropout(), image)
    assert samplewise.is_samplewise(nn.LayerNorm([5, 5]), image)


class Centred(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - input.mean(0))


def hooked(model: nn.Sequential) -> nn.Sequential:
    model[1].register_forward_hook(lambda module, args, output: output - output.mean(0))
    return model


def with_own_forward(model: nn.Sequential) -> nn.Sequential:
    forward = model[1].forward
    model[1].forward = lambda x: forward(x - x.mean(0))
    return model


@pytest.mark.parametrize(
    "change",
    [
        hooked,
        with_own_forward,
        lambda model: nn.Sequential(model, Centred(3, 3).double()),
        lambda model: nn.Sequential(model, nn.Softmax(dim=0)),
        lambda model: nn.Sequential(nn.Sequential(hooked(model))),
    ],
)
def test_what_may_mix_rows_is_not_called_with_the_batch(change, passes):
    x, y = batch()
    model = change(mlp())
    assert_right(model, lambda output, target: output.square().sum(), x, y)
    assert passes == [False]


def test_a_hook_of_all_modules_is_noticed(passes):
    x, y = batch()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert_right(mlp(), F.cross_entropy, x, y.clamp(min=0))
    finally:
        handle.remove()
    assert passes == [False]


LOSSES = {
    "function": (F.cross_entropy, True),
    "module": (nn.CrossEntropyLoss(), True),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), True),
    "another index": (nn.CrossEntropyLoss(ignore_index=1), True),
    "weights": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3]).double()), False),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), False),
    "none": (nn.CrossEntropyLoss(reduction="none"), False),
    "own": (lambda output, target: F.cross_entropy(2 * output, target), False),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_of_classes(kind, passes):
    loss_fn, is_known = LOSSES[kind]
    x, y = batch()
    # Where the loss itself is NaN, for a sample of which no position counts, the gradient is zero.
    y = y.clamp(min=0) if kind in ("smoothing", "another index") else y
    model = mlp()
    assert_right(model, loss_fn, x, y)
    assert passes == [True]
    found = samplewise.summed_losses(loss_fn, model(x), y)
    assert (found is not None) == is_known


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("cls", [nn.MSELoss, nn.BCEWithLogitsLoss])
@pytest.mark.parametrize("shape", [(3,), (5, 3)])
def test_losses_of_elements(cls, reduction, shape, passes):
    x = torch.randn(6, *shape[:-1], 4).double()
    y = torch.rand(6, *shape).double()
    model, loss_fn = mlp(), cls(reduction=reduction)
    assert_right(model, loss_fn, x, y)
    if reduction == "mean":
        function = F.mse_loss if cls is nn.MSELoss else F.binary_cross_entropy_with_logits
        assert_right(model, function, x, y)
    assert all(passes)
    assert samplewise.summed_losses(loss_fn, model(x), y) is not None


def test_losses_that_are_not_summed():
    output, target = torch.randn(6, 3), torch.rand(6, 3)
    weights = torch.rand(3)
    assert (
        samplewise.summed_losses(nn.BCEWithLogitsLoss(pos_weight=weights), output, target) is None
    )
    assert samplewise.summed_losses(F.mse_loss, output, target[:, :1]) is None
    assert samplewise.summed_losses(F.cross_entropy, output, target) is None  # probabilities
    positions = torch.randn(6, 3, 5), torch.randint(3, (6, 5))
    assert samplewise.summed_losses(F.cross_entropy, *positions) is None
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda module, args, output: 2 * output)
    assert samplewise.summed_losses(loss, output, target) is None


def test_an_output_in_place_and_a_shared_layer(passes):
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(
        nn.Identity(), shared, nn.ReLU(inplace=True), shared, nn.Flatten(), nn.SiLU(inplace=True)
    ).double()
    x = torch.randn(5, 2, 4).double()
    assert_right(model, F.mse_loss, x, torch.randn(5, 8).double())
    assert passes == [True]


class Operators(TorchDispatchMode):
    """Counts those that launch a kernel or copy."""

    VIEWS = (
        "view",
        "t.",
        "transpose",
        "detach",
        "expand",
        "alias",
        "permute",
        "unsqueeze",
        "slice",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.count += not any(f".{view}" in name for view in self.VIEWS)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["mlp", "convolutions"])
def test_a_pass_has_no_operator_that_training_does_not_have(kind):
    """Up to the layer calls. On a GPU every operator costs microseconds of the host."""
    model, x = mlp().float(), torch.randn(6, 4)
    if kind == "convolutions":
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        x = torch.randn(6, 3, 5, 5)
    y = torch.randint(3, (6,))
    with Operators() as training:
        F.cross_entropy(model(x), y).backward()
    with Operators() as ours:
        torchium.gradients.per_sample_norms(model, F.cross_entropy, x, y)
    assert ours.count <= training.count + 1  # the norms


@pytest.mark.parametrize("max_workspace_bytes", [1, 500, 2**28])
@pytest.mark.parametrize("bias", [False, True])
def test_norms_of_all_layers_together_and_one_by_one(max_workspace_bytes, bias):
    """The workspace holds no layer, one, or all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=bias), nn.ReLU(), nn.Linear(5, 3)).double()
    model.float()
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    x[:3] *= 1e15  # the squares of some gradients overflow in float32
    rows = torchium.per_sample_gradients(model, F.mse_loss, x, y)
    expected = torch.cat([r.double().flatten(1) for r in rows.values()], 1).norm(dim=1)
    norms = torchium.gradients.per_sample_norms(
        model, F.mse_loss, x, y, max_workspace_bytes=max_workspace_bytes
    )
    torch.testing.assert_close(norms, expected.float())


def test_rows_share_no_memory():
    model, (x, y) = mlp(), batch()
    rows = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    rows["0.bias"].zero_()
    assert rows["0.weight"].abs().sum() > 0
    pointers = [r.untyped_storage().data_ptr() for r in rows.values()]
    assert len(set(pointers)) == len(pointers)


def test_inputs_are_those_of_the_caller_after_an_activation_in_place():
    model = nn.Sequential(nn.SiLU(inplace=True), nn.Linear(4, 3)).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3
    before = x.clone()
    rows = torchium.per_sample_gradients(model, nn.functional.cross_entropy, x, y)
    assert torch.equal(x, before)
    for i in range(5):
        loss = nn.functional.cross_entropy(model(x[i : i + 1].clone()), y[i : i + 1])
        expected = torch.autograd.grad(loss, list(model.parameters()))
        for row, gradient in zip(rows.values(), expected, strict=True):
            torch.testing.assert_close(row[i], gradient)


def test_a_weight_computed_from_that_of_another_layer_is_not_ignored():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4, bias=False)).double()
    del model[2].weight
    model[2].weight = model[0].weight.t()
    x = torch.randn(5, 4, dtype=torch.float64)
    with pytest.raises((ValueError, RuntimeError)):
        torchium.per_sample_gradients(model, nn.functional.mse_loss, x, x)
