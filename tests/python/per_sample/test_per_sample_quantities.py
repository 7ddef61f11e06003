"""Norms, inner products and clipped sums of per-sample gradients against explicit gradients."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchium
from captured_layers import MODELS, Conv1D, Scaled, UsedOutside, loss_fn, model_and_batch
from reference import per_sample_quantities as expected
from reference.per_sample import per_sample_gradients as reference_gradients
from test_per_sample_samples import FORWARDS, Layers
from torch import Tensor, nn
from torch.nn import functional as F
from torchium import gradients

ONE_SAMPLE = 1  # byte: chunks of one sample


def vectors_for(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def assert_right(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss: Callable[..., Tensor] = loss_fn,
    tolerance: float = 1e-9,
    reference: nn.Module | None = None,
    **options: int,
) -> None:
    """All quantities, with norms on both sides of ``max_norm``, and ``.grad`` that is added to."""
    rows = reference_gradients(reference or model, loss, inputs, targets)
    batch = model, loss, inputs, targets
    norms = expected.norms(rows)
    dtype = torch.float64 if any(r.dtype == torch.float64 for r in rows.values()) else torch.float32
    if reference is not None:
        dtype = torch.float32
    limit = float(norms.median())
    close = {"rtol": tolerance, "atol": tolerance * max(1.0, float(norms.max()))}

    found = gradients.per_sample_norms(*batch, **options)
    assert found.dtype == dtype
    assert not found.requires_grad
    torch.testing.assert_close(found.double(), norms, **close)

    found = gradients.gram(*batch, **options)
    assert found.dtype == torch.float64
    assert torch.equal(found, found.T)
    square = {"rtol": tolerance, "atol": tolerance * max(1.0, float(norms.max()) ** 2)}
    torch.testing.assert_close(found, expected.gram(rows), **square)

    vectors = vectors_for(model)
    found = gradients.jvp_dots(*batch, vectors, **options)
    assert found.dtype == dtype
    scale = float(expected.jacobian({n: v[None] for n, v in vectors.items()}).norm())
    torch.testing.assert_close(
        found.double(),
        expected.jvp_dots(rows, vectors),
        rtol=tolerance,
        atol=close["atol"] * max(1.0, scale),
    )

    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for i, p in enumerate(params.values()):
        p.grad = None if i % 2 else torch.full_like(p, 0.5)
    found = gradients.clip_and_accumulate(*batch, limit, **options)
    torch.testing.assert_close(found.double(), norms, **close)
    sums = expected.clipped_sums(rows, limit)
    for i, (name, p) in enumerate(params.items()):
        total = sums[name] + (0.0 if i % 2 else 0.5)
        assert p.grad.dtype == p.dtype
        rounding = 4 * torch.finfo(p.dtype).eps
        torch.testing.assert_close(
            p.grad.double(),
            total,
            rtol=tolerance + rounding,
            atol=(tolerance + rounding) * len(norms) * limit,
            msg=name,
        )
        p.grad = None


class WithTemperature(nn.Module):
    """Has parameters without dimensions and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.temperature + self.empty.sum()


def test_parameters_without_dimensions():
    model = WithTemperature().double()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_right(model, x, torch.arange(5) % 4, F.cross_entropy)
    assert_right(model, x, torch.arange(5) % 4, F.cross_entropy, max_workspace_bytes=ONE_SAMPLE)


@pytest.mark.parametrize("name", MODELS)
def test_layers(name, device):
    model, batch = model_and_batch(name, samples=6, device=device)
    assert_right(model, *batch)


@pytest.mark.parametrize("name", MODELS)
def test_layers_in_chunks_of_one_sample(name, device):
    model, batch = model_and_batch(name, samples=4, device=device)
    assert_right(model, *batch, max_workspace_bytes=ONE_SAMPLE)
    rows = gradients.per_sample_gradients(model, loss_fn, *batch, max_workspace_bytes=ONE_SAMPLE)
    right = reference_gradients(model, loss_fn, *batch)
    assert rows.keys() == right.keys()
    for key, row in rows.items():
        torch.testing.assert_close(row, right[key], msg=key)


def test_rows_by_vmap_in_chunks():
    model = WithTemperature().double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 4
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    two_samples = 2 * sum(p.nbytes for p in model.parameters())
    found = gradients.per_sample_gradients(
        model, F.cross_entropy, x, y, max_workspace_bytes=two_samples
    )
    assert len(passes) == 3
    right = reference_gradients(model, F.cross_entropy, x, y)
    for name, rows in found.items():
        torch.testing.assert_close(rows, right[name], msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_float32(name, device):
    model, batch = model_and_batch(name, samples=6, dtype=torch.float32, device=device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    double = [t.double() if t.is_floating_point() else t for t in batch]
    rows = reference_gradients(copy.deepcopy(model).double(), loss_fn, *double)
    norms = gradients.per_sample_norms(model, loss_fn, *batch)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), expected.norms(rows), rtol=2e-5, atol=1e-7)
    assert_right(model, *batch, tolerance=1e-4)


def linear_on(positions: int, bias: bool = True) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(5, positions, 6, dtype=torch.float64)
    model.double()(x)
    return model, x, torch.randint(3, (5,))


@pytest.mark.parametrize("positions", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("workspace", [ONE_SAMPLE, 2**12, 2**28])
def test_positions_on_both_sides_of_the_rule(positions, bias, workspace):
    """2 T^2 < 48 up to T = 4."""
    assert_right(*linear_on(positions, bias), max_workspace_bytes=workspace)


class Twice(nn.Module):
    """A layer used once for each of two inputs with different numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x)).sum(1) + torch.tanh(self.layer(x[:, :1])).sum(1)
        return self.out(y + self.layer(x[:, 0]))


def test_uses_of_a_parameter_are_positions():
    assert_right(Twice().double(), torch.randn(4, 3, 4).double(), torch.randint(3, (4,)))


def test_gradients_of_positions_that_cancel():
    """The inner products of positions are as large as the gradient is small."""
    layer = nn.Linear(64, 64, bias=False).double()
    x = torch.randn(3, 1, 64).double().repeat(1, 2, 1)
    signs = torch.tensor([1.0, -1.0 + 1e-5]).double()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.sum(2) * signs).sum()

    rows = reference_gradients(layer, loss, x, torch.zeros(3))
    found = gradients.per_sample_norms(layer, loss, x, torch.zeros(3))
    torch.testing.assert_close(found, expected.norms(rows), rtol=1e-4, atol=0)
    found = gradients.per_sample_norms(layer.float(), loss, x.float(), torch.zeros(3))
    torch.testing.assert_close(found.double(), expected.norms(rows), rtol=2e-2, atol=0)


def other_models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Layers that need vmap, and those that need one pass per sample."""
    torch.manual_seed(0)
    return {
        "conv1d": (
            nn.Sequential(
                nn.Conv1d(2, 4, 3, stride=2, padding=2, dilation=2, groups=2),
                nn.Flatten(),
                nn.LazyLinear(3),
            ),
            torch.randn(4, 2, 9),
        ),
        "transformers_conv1d": (
            nn.Sequential(Conv1D(5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)),
            torch.randn(4, 3, 4),
        ),
        "rms_norm": (nn.Sequential(nn.RMSNorm(5), nn.Linear(5, 3)), torch.randn(4, 5)),
        "scaled": (Scaled(), torch.randn(4, 4)),
        "used_outside": (UsedOutside(), torch.randn(4, 4)),
        "eval_batch_norm": (
            nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3).eval()),
            torch.randn(4, 5),
        ),
        "lstm": (Last(), torch.randn(4, 3, 5)),
    }


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


@pytest.mark.parametrize("workspace", [ONE_SAMPLE, 1500, 2**28])
@pytest.mark.parametrize("name", other_models())
def test_other_models(name, workspace):
    model, x = other_models()[name]
    model, x = model.double(), x.double()
    if name in ("conv1d",):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_right(model, x, torch.randint(3, (4,)), max_workspace_bytes=workspace)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "per_sample_norms": gradients.per_sample_norms,
    "gram": gradients.gram,
    "jvp_dots": lambda *batch: gradients.jvp_dots(*batch, vectors_for(batch[0])),
    "clip_and_accumulate": lambda *batch: gradients.clip_and_accumulate(*batch, 1.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_pass_per_sample_says_so_with_the_name_of_the_function(name):
    with pytest.warns(UserWarning, match=f"^{name} takes the samples one by one.*LSTM") as caught:
        FUNCTIONS[name](Last(), loss_fn, torch.randn(2, 3, 5), torch.tensor([0, 1]))
    assert [warning.filename for warning in caught] in ([__file__], [gradients.gram.__module__])


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_models_that_move_samples(forward):
    torch.manual_seed(0)
    model = Layers(forward).double()
    model.requires_grad_(True)
    x, y = torch.randn(4, 4, 4).double(), torch.randint(4, (4,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_right(model, x, y)


def test_frozen_parameters():
    model, batch = model_and_batch("mlp")
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    assert_right(model, *batch)
    assert model[0].weight.grad is None


def test_nested_inputs_and_no_targets():
    model, (x, _) = model_and_batch("mlp")
    assert_right(model, {"input": x}, None, lambda output, target: output.square().sum())


def test_samples_without_a_gradient():
    """Their norm is 0, and they are not scaled."""
    model, (x, y) = model_and_batch("mlp")
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0]).double()

    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, target[0]) * target[1].sum()

    norms = gradients.clip_and_accumulate(model, loss, x, (y, weights), 0.1)
    assert norms[0] == norms[2] == 0
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_gradients_that_are_not_finite_are_not_hidden():
    model, (x, y) = model_and_batch("mlp")
    x[1] = float("inf")
    norms = gradients.clip_and_accumulate(model, loss_fn, x, y, 1.0)
    assert norms.isfinite().tolist() == [True, False, True, True, True]
    assert all(p.grad.isnan().any() for p in model.parameters())


def test_a_limit_of_infinity_clips_nothing():
    model, batch = model_and_batch("mlp")
    gradients.clip_and_accumulate(model, loss_fn, *batch, float("inf"))
    rows = torchium.per_sample_gradients(model, loss_fn, *batch)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, rows[name].sum(0))


def test_parts_of_a_batch_add_up():
    model, (x, y) = model_and_batch("convolutions", samples=6)
    gradients.clip_and_accumulate(model, loss_fn, x, y, 0.5)
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part in (slice(0, 2), slice(2, 6)):
        gradients.clip_and_accumulate(model, loss_fn, x[part], y[part], 0.5)
    for p, expected_sum in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(p.grad, expected_sum)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, device):
    """Float32 results from tensors in half precision."""
    model, (x, y) = model_and_batch("mlp", dtype=dtype, device=device)
    rows = reference_gradients(model, loss_fn, x, y)
    norms = gradients.per_sample_norms(model, loss_fn, x, y)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), expected.norms(rows), rtol=0.05, atol=0)
    gradients.clip_and_accumulate(model, loss_fn, x, y, float(norms.median()))
    sums = expected.clipped_sums(rows, float(norms.median()))
    for name, p in model.named_parameters():
        assert p.grad.dtype == dtype
        assert (p.grad - sums[name]).norm() <= 0.05 * sums[name].norm() + 1e-3


def test_autocast(device):
    model, (x, y) = model_and_batch("mlp", dtype=torch.float32, device=device)
    exact = gradients.gram(model, loss_fn, x, y)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        rounded = gradients.gram(model, loss_fn, x, y)
        norms = gradients.per_sample_norms(model, loss_fn, x, y)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.05 * float(exact.max()))
    torch.testing.assert_close(norms.double(), rounded.diag().sqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_else_changes(name, device):
    model, batch = model_and_batch("tied_embedding", device=device)
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(lambda module, args, output: output + 0 * module.calls.add_(1))
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    tensors = [*model.parameters(), *model.buffers(), *batch]
    before = [t.detach().clone() for t in tensors]
    versions = [t._version for t in tensors]
    state = torch.get_rng_state()
    with torch.no_grad():
        FUNCTIONS[name](model, loss_fn, *batch)
    assert [t._version for t in tensors] == versions
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    changed = name == "clip_and_accumulate"
    for p in model.parameters():
        assert bool((p.grad == 3.0).all()) is not changed


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(5), r"model\.0 \(BatchNorm1d\) normalises with the statistics"),
        (nn.Dropout(0.1), r"model\.0 \(Dropout\) drops out at random"),
    ],
)
def test_what_has_no_gradient_of_a_sample_is_refused(name, layer, message):
    model = nn.Sequential(layer, nn.Linear(5, 3))
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[name](model, loss_fn, torch.ones(2, 5), torch.tensor([0, 1]))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["mlp", "convolutions", "tied_embedding"])
def test_an_empty_batch_is_clipped_to_zeros(name):
    """Poisson sampling draws one now and then."""
    model, (inputs, targets) = model_and_batch(name)
    norms = gradients.clip_and_accumulate(model, loss_fn, inputs[:0], targets[:0], 1.0)
    assert norms.shape == (0,)
    assert norms.dtype == gradients.per_sample_norms(model, loss_fn, inputs, targets).dtype
    for p in model.parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))
    gradients.clip_and_accumulate(model, loss_fn, inputs, targets, 1.0)
    before = [p.grad.clone() for p in model.parameters()]
    gradients.clip_and_accumulate(model, loss_fn, inputs[:0], targets[:0], 1.0)
    for p, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)
    with pytest.raises(ValueError, match="inputs holds 0 samples and targets"):
        gradients.clip_and_accumulate(model, loss_fn, inputs[:0], targets, 1.0)


def test_bad_arguments():
    model, batch = model_and_batch("mlp")
    for name in ("per_sample_gradients", "per_sample_norms", "gram"):
        with pytest.raises(ValueError, match="max_workspace_bytes is 0; it must be a positive"):
            getattr(gradients, name)(model, loss_fn, *batch, max_workspace_bytes=0)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"max_norm is {bad}; it must be positive"):
            gradients.clip_and_accumulate(model, loss_fn, *batch, bad)
    for bad in ("1", None, [1.0]):
        with pytest.raises(
            ValueError, match=re.escape(f"max_norm is {bad!r}; it must be a number")
        ):
            gradients.clip_and_accumulate(model, loss_fn, *batch, bad)
    v = vectors_for(model)
    for vectors, message in (
        ({**v, "9.weight": v["0.bias"]}, "'9.weight', which is no trainable parameter"),
        ({n: x for n, x in v.items() if n != "0.bias"}, "no entry '0.bias'; pass zeros"),
        ({**v, "0.bias": v["0.weight"]}, r"vectors\['0.bias'\] is \(8, 5\); .* shape \(8,\)"),
        (list(v.values()), "vectors is of type list; it must be a dict"),
        ({**v, "0.bias": 1.0}, r"vectors\['0.bias'\] is float; .* shape \(8,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            gradients.jvp_dots(model, loss_fn, *batch, vectors)
    with pytest.raises(ValueError, match="no parameter of Sequential requires a gradient"):
        gradients.gram(model.requires_grad_(False), loss_fn, *batch)
    assert all(p.grad is None for p in model.parameters())


def test_sparse_gradients_are_added_to():
    table = nn.Embedding(6, 3, sparse=True)
    out = nn.Sequential(table, nn.Flatten(), nn.Linear(6, 2))
    x, y = torch.randint(6, (4, 2)), torch.randint(2, (4,))
    loss_fn(out(x), y).backward()
    before = table.weight.grad.to_dense()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        gradients.clip_and_accumulate(out, loss_fn, x, y, float("inf"))
    torch.testing.assert_close(table.weight.grad.to_dense(), 5 * before, rtol=1e-4, atol=1e-6)


def test_memory_format_of_a_new_gradient():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3))
    model = model.to(memory_format=torch.channels_last)
    gradients.clip_and_accumulate(
        model, loss_fn, torch.randn(2, 2, 4, 4), torch.tensor([0, 1]), 1.0
    )
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


class OwnWeights(nn.Module):
    """A model that runs a layer with weights of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 2 * p for name, p in self.a.named_parameters()}
        return self.b(torch.func.functional_call(self.a, weights, (x,)).tanh())


def reversing(where: str) -> nn.Module:
    """A model with a hook that turns the gradient of a module around."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    if where == "backward":
        model[1].register_full_backward_hook(lambda module, inputs, outputs: (-inputs[0],))
    else:
        model[0].register_full_backward_pre_hook(lambda module, outputs: (-outputs[0],))
    return model


@pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:.*samples one by one")
@pytest.mark.parametrize("make", [OwnWeights, lambda: reversing("backward"), lambda: reversing("")])
def test_models_whose_gradients_do_not_follow_from_layer_calls(make):
    model = make().double()
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    assert_right(model, x, y)
    rows = gradients.per_sample_gradients(model, loss_fn, x, y)
    for name, expected_rows in reference_gradients(model, loss_fn, x, y).items():
        torch.testing.assert_close(rows[name], expected_rows)


def test_a_model_that_changes_its_weights():
    class Shrinking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
            return self.layer(x)

    model = Shrinking()
    before = copy.deepcopy(model.state_dict())
    gradients.per_sample_norms(model, loss_fn, torch.randn(3, 4), torch.tensor([0, 1, 2]))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_complex_parameters_are_refused_by_name():
    model = nn.Linear(4, 3, dtype=torch.complex64)
    x = torch.randn(2, 4, dtype=torch.complex64)
    for name in ("per_sample_norms", "gram"):
        with pytest.raises(ValueError, match=r"'weight' is torch.complex64; only per_sample_grad"):
            getattr(gradients, name)(model, lambda y, t: y.abs().sum(), x, None)
