"""p.grad_sample of ordinary backward passes."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
import torchium
from captured_layers import MODELS, Scaled, UsedOutside, loss_fn, model_and_batch
from reference.per_sample import per_sample_gradients as reference_gradients
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.nn import functional as F
from torchium.gradients import per_sample


def assert_right(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad_sample, expected[name], msg=name)
            assert not p.grad_sample.requires_grad


def hooks_of(model: nn.Module) -> int:
    found = sum(len(m._forward_hooks) for m in model.modules())
    return found + sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_training_step(name, reduction, device):
    model, (x, y) = model_and_batch(name, device=device)
    if name == "two_tables":
        model.unused.requires_grad_(False)  # of no layer
    expected = reference_gradients(model, loss_fn, x, y)
    with per_sample(model, reduction=reduction):
        F.cross_entropy(model(x), y, reduction=reduction).backward()
    assert_right(model, expected)
    for name, p in model.named_parameters():
        if p.grad is not None:
            total = getattr(expected[name], reduction)(0)
            torch.testing.assert_close(p.grad, total)
    assert hooks_of(model) == 0


class Inputs(nn.Module):
    """Keyword arguments of a dict, in-place activations, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = F.relu(self.a(batch["x"]), inplace=True)
        return {"logits": self.b(self.dropout(hidden))}


def assert_rows_are_of(model, losses):
    """Of autograd, of the same pass."""
    params = list(model.parameters())
    rows = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    for p, row in zip(params, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(p.grad_sample, torch.stack(row))


def test_dicts_and_dropout():
    """Each sample has its own mask; autograd's gradients of the same pass are the reference."""
    model = Inputs().double()
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    with per_sample(model):
        losses = F.cross_entropy(model({"x": x})["logits"], y, reduction="none")
        losses.mean().backward(retain_graph=True)
    assert_rows_are_of(model, losses)


def attention_layers():
    """Those of torch.nn, how they are called, and whether samples come first."""

    def encode(model, x):
        return model(x)

    def attend(model, x):
        return model(x, x, x, need_weights=False)[0]

    found = []
    for batch_first in (True, False):
        name = "samples_first" if batch_first else "positions_first"
        options = {"dropout": 0.2, "batch_first": batch_first}
        layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
        stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        attention = nn.MultiheadAttention(8, 2, **options)
        found += [
            pytest.param(layer, encode, batch_first, id=f"layer-{name}"),
            pytest.param(stack, encode, batch_first, id=f"stack-{name}"),
            pytest.param(attention, attend, batch_first, id=f"attention-{name}"),
        ]
    return found


@pytest.mark.parametrize(("model", "call", "batch_first"), attention_layers())
def test_self_attention(model, call, batch_first):
    model = copy.deepcopy(model).double()
    x = torch.randn(3, 5, 8).double()
    with per_sample(model):
        y = call(model, x if batch_first else x.transpose(0, 1))
        losses = (y.movedim(0 if batch_first else 1, 0).flatten(1) - 1).pow(4).sum(1)
        losses.mean().backward(retain_graph=True)
    assert_rows_are_of(model, losses)


def test_attention_to_other_keys_is_refused():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x, keys = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    with (
        pytest.raises(ValueError, match="'in_proj_weight' outside of its layer"),
        per_sample(model),
    ):
        model(x, keys, keys)[0].sum().backward()


def test_passes_are_more_samples():
    """Of different sizes, each with the mean of its own samples."""
    model, (x, y) = model_and_batch("mlp", samples=7)
    with per_sample(model):
        for part in (slice(0, 3), slice(3, 7)):
            loss_fn(model(x[part]), y[part]).backward()
    assert_right(model, reference_gradients(model, loss_fn, x, y))


def test_zero_grad_discards_the_passes_before():
    model, (x, y) = model_and_batch("mlp")
    with per_sample(model):
        loss_fn(model(x[:2]), y[:2]).backward()
        model.zero_grad()
        loss_fn(model(x), y).backward()
    assert_right(model, reference_gradients(model, loss_fn, x, y))


def test_other_passes_do_not_count():
    model, (x, y) = model_and_batch("mlp")
    with per_sample(model):
        with torch.no_grad():
            model(x)
        model(x)
        torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))
        loss_fn(model(x), y).backward()
    assert_right(model, reference_gradients(model, loss_fn, x, y))


def test_frozen_and_unused_parameters():
    model, (x, y) = model_and_batch("two_tables")
    model.unused.requires_grad_(False)
    model.other = nn.Linear(2, 2)
    with per_sample(model):
        loss_fn(model(x), y).backward()
    assert not hasattr(model.unused, "grad_sample")
    assert model.other.weight.grad_sample.shape == (5, 2, 2)
    assert not model.other.weight.grad_sample.any()


def test_blocks_replace_rows():
    model, (x, y) = model_and_batch("mlp")
    block = per_sample(model)
    for part in (slice(0, 2), slice(2, 5)):
        with block:
            loss_fn(model(x[part]), y[part]).backward()
        assert_right(model, reference_gradients(model, loss_fn, x[part], y[part]))


def test_an_exception_sets_nothing():
    model, (x, y) = model_and_batch("mlp")
    model[0].bias.grad_sample = torch.ones(3)  # of an older block
    block = per_sample(model)
    block.__enter__()
    loss_fn(model(x), y).backward()
    block.__exit__(KeyError, KeyError(), None)
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    assert hooks_of(model) == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), r"model\.1 \(BatchNorm1d\) normalises"),
        (nn.Sequential(nn.Linear(4, 4), nn.PReLU()), r"model\.1 \(PReLU\) is of an unsupported"),
        (Scaled(), r"model \(Scaled\) has the parameter .* beside its layers"),
        (nn.MultiheadAttention(4, 2, kdim=3), r"model \(MultiheadAttention\) has kdim or vdim"),
        (
            nn.MultiheadAttention(4, 2, add_bias_kv=True),
            r"model \(MultiheadAttention\) has bias_k .*per_sample_gradients\(\)",
        ),
        (nn.Linear(4, 3).requires_grad_(False), "no parameter of Linear requires a gradient"),
    ],
)
def test_refused_models(model, message):
    with pytest.raises(ValueError, match=message), per_sample(model):
        raise AssertionError
    assert hooks_of(model) == 0


class BatchNormCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.layer(x), None, None, training=True)


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.reshape(-1, 4)).view_as(x).sum(1))


class SharedPositions(nn.Module):
    """As in BERT and GPT-2 of transformers: one row of positions for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.layer = nn.Embedding(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.positions(torch.arange(2)[None])).sum(1)


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (UsedOutside(), (5, 4), "parameter 'a.weight' outside of its layer"),
        (BatchNormCall(), (5, 4), "normalised with the statistics of the batch"),
        (
            Folded(),
            (5, 2, 4),
            r"model\.b \(Linear\) has seen 5 samples and model\.a \(Linear\) 10 ",
        ),
        (
            SharedPositions(),
            (5, 2, 4),
            r"model\.positions \(Embedding\) has seen 1 .* to \[5, \.\.\.\]",
        ),
    ],
)
def test_refused_passes(model, shape, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=message), per_sample(model):
            loss_fn(model(torch.randn(shape)), torch.randint(3, shape[:1])).backward()
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def test_refused_uses():
    model, (x, y) = model_and_batch("mlp")
    with pytest.raises(ValueError, match="reduction is 'none'; it must be 'mean' or 'sum'"):
        per_sample(model, reduction="none")
    loss = loss_fn(model(x), y)
    with (
        pytest.raises(ValueError, match="run the forward and the backward pass inside"),
        per_sample(model),
    ):
        loss.backward()
    block = per_sample(model)
    with block:
        with pytest.raises(ValueError, match="is running already"), block:
            pass
        loss_fn(model(x), y).backward()


def test_rows_in_the_dtype_of_the_parameters():
    model, (x, y) = model_and_batch("mlp", dtype=torch.float32)
    with per_sample(model), torch.autocast("cpu", torch.bfloat16):
        loss_fn(model(x), y).backward()
    expected = torchium.per_sample_gradients(model, loss_fn, x, y)
    for name, p in model.named_parameters():
        assert p.grad_sample.dtype == torch.float32
        torch.testing.assert_close(p.grad_sample, expected[name], rtol=0.2, atol=0.1)


def test_what_a_hook_of_an_output_makes_of_its_gradient_counts():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    with per_sample(model):
        z = model[0](x)
        z.register_hook(lambda gradient: 10 * gradient)
        F.cross_entropy(model[2](model[1](z)), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_sample.mean(0), p.grad)


def test_a_buffer_that_is_refilled_in_the_block_is_refused():
    model = nn.Linear(4, 3)
    x, y = torch.randn(6, 4), torch.randint(3, (6,))

    def train() -> None:
        with per_sample(model):
            F.cross_entropy(model(x), y).backward()
            x.zero_()

    with pytest.raises(ValueError, match=r"changed in place .* until the per_sample block has"):
        train()


def test_parameters_that_are_frozen_or_thawed():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    with per_sample(model):
        F.cross_entropy(model(x), y).backward()
    model[0].requires_grad_(False)
    with per_sample(model):
        F.cross_entropy(model(x[:2]), y[:2]).backward()
    assert not hasattr(model[0].weight, "grad_sample")
    assert len(model[1].weight.grad_sample) == 2

    def thaw() -> None:
        with per_sample(model):
            model[0].requires_grad_(True)
            F.cross_entropy(model(x), y).backward()

    with pytest.raises(ValueError, match=r"'0.weight' has become trainable inside"):
        thaw()


def test_parameters_that_are_frozen_behind_the_backward_pass():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    with per_sample(model):
        F.cross_entropy(model(x), y).backward()
        model[0].requires_grad_(False)
    assert not hasattr(model[0].weight, "grad_sample")
    torch.testing.assert_close(model[1].weight.grad_sample.mean(0), model[1].weight.grad)


def test_lookups_that_may_be_positions_are_refused():
    tokens, positions = nn.Embedding(9, 4), nn.Embedding(6, 4)
    x = torch.randint(9, (3, 3))
    with (
        pytest.raises(ValueError, match=r"3 indices, .* another one has seen \[3, 3\]"),
        per_sample(nn.ModuleList([tokens, positions])),
    ):
        (tokens(x) + positions(torch.arange(3))).square().mean().backward()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def test_compiled_code_runs_uncompiled_in_a_block_and_stays_compiled():
    torch.compiler.reset()
    compiled: list[object] = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model, x, y = mlp(), torch.randn(6, 4), torch.randint(3, (6,))
    other = torch.compile(lambda x: x.sin().sum(), backend=backend)
    of_model = torch.compile(model, backend=backend)
    other(x)
    of_model(x)
    count = len(compiled)
    for _ in range(3):
        with torchium.per_sample(model):
            F.cross_entropy(of_model(x), y).backward()
            other(x)
        expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad_sample, expected[name])
        other(x)
        of_model(x)
    assert len(compiled) == count


def test_a_block_in_a_compiled_function():
    torch.compiler.reset()
    model, x, y = mlp(), torch.randn(6, 4), torch.randint(3, (6,))

    def rows() -> list[Tensor]:
        with torchium.per_sample(model):
            F.cross_entropy(model(x), y).backward()
        return [p.grad_sample for p in model.parameters()]

    expected = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    compiled = torch.compile(rows, backend="eager")
    for _ in range(2):
        for found, right in zip(compiled(), expected.values(), strict=True):
            torch.testing.assert_close(found, right)


class Chosen(nn.Module):
    """``torch.cond`` compiles itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(torch.cond(x.sum() > 0, torch.sin, torch.cos, (h,)))


def test_conditions_in_a_block():
    torch.compiler.reset()
    model, x, y = Chosen(), torch.randn(6, 4), torch.randint(3, (6,))
    rows = []
    for _ in range(2):
        with torchium.per_sample(model):
            F.cross_entropy(model(x), y).backward()
        rows.append([p.grad_sample for p in model.parameters()])
    h = model.first(x)
    h = torch.sin(h) if x.sum() > 0 else torch.cos(h)
    losses = F.cross_entropy(model.last(h), y, reduction="none")
    for i, loss in enumerate(losses):
        expected = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        for found in rows:
            for row, right in zip(found, expected, strict=True):
                torch.testing.assert_close(row[i], right)


def test_the_stance_of_the_compiler_is_that_of_before_in_any_order():
    """A stance that begins in a block and ends behind it sets the one it has met again."""
    torch.compiler.reset()
    model = mlp()
    torch.compile(lambda x: x.sin(), backend="eager")(torch.randn(3))
    before = dataclasses.replace(eval_frame._stance)
    with torchium.per_sample(model):
        assert eval_frame._stance.stance == "force_eager"
        F.mse_loss(model(torch.randn(6, 4)), torch.randn(6, 3)).backward()
        other = torch.compiler.set_stance("eager_on_recompile")
    assert eval_frame._stance.stance == "eager_on_recompile"
    other.__exit__(None, None, None)
    assert eval_frame._stance == before
