"""torchium.per_sample_gradients for layers of every kind, and for nested inputs."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchium
from reference.per_sample import per_sample_gradients as reference_gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune


def squares(output: Any, target: Tensor) -> Tensor:
    output = output if isinstance(output, Tensor) else output[0]
    return (output.flatten(1).square().sum(1) * target).sum()


def assert_right(model: nn.Module, inputs: Any, targets: Any, loss=squares) -> None:
    before = {n: t.clone() for n, t in model.state_dict().items()}
    gradients = torchium.per_sample_gradients(model, loss, inputs, targets)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    expected = reference_gradients(model, loss, inputs, targets)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


class Around(nn.Module):
    """Calls a module with other arguments than the inputs alone."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.module, x)


def itself(attention: nn.Module, x: Tensor) -> Tensor:
    return attention(x, x, x)[0]


def time_first(recurrent: nn.Module, x: Tensor) -> Tensor:
    return recurrent(x.transpose(0, 1))[0].sum(0)


def by_its_gradient(mlp: nn.Module, x: Tensor) -> Tensor:
    """As in a loss with derivatives with respect to the inputs."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(mlp(x).sum(), x, create_graph=True)[0]


def by_a_functional_gradient(mlp: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda z: mlp(z).sum()))(x)


def writes_into_a_buffer(layer: nn.Module, x: Tensor) -> Tensor:
    result = torch.zeros(x.shape[0], 2, 3, dtype=x.dtype)
    result[:, 0] = layer(x)
    return result


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def decides(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) if x.sum() > 0 else layer(layer(x))


# name -> model, shape of a sample; an int: that many indices
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | int]] = {
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, groups=2, padding="same"), (2, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), (2, 4, 4, 4)),
    "transposed_1d": (lambda: nn.ConvTranspose1d(2, 4, 3, stride=2), (2, 7)),
    "transposed_2d": (lambda: nn.ConvTranspose2d(2, 4, 3, groups=2), (2, 4, 4)),
    "transposed_3d": (lambda: nn.ConvTranspose3d(2, 4, 2), (2, 3, 3, 3)),
    "instance_norm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
    "rms_norm": (lambda: nn.RMSNorm(5), (3, 5)),
    "batch_norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), (3,)),
    "prelu": (lambda: nn.PReLU(3), (3, 5)),
    "attention": (lambda: Around(nn.MultiheadAttention(4, 2, batch_first=True), itself), (5, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), (5, 4)),
    "encoder_in_eval_mode": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
        (5, 4),
    ),
    "embedding_bag": (lambda: nn.EmbeddingBag(9, 4), 5),
    "embedding_bag_max": (lambda: nn.EmbeddingBag(9, 4, mode="max"), 5),
    "embedding_by_frequency": (lambda: nn.Embedding(9, 4, scale_grad_by_freq=True), 5),
    "bilinear": (lambda: Around(nn.Bilinear(3, 3, 2), lambda m, x: m(x, x)), (3,)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), (3,)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 4)).eval(), (3,)),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.5), (3,)),
    "inner_vmap": (
        lambda: Around(nn.Linear(3, 5), lambda m, x: torch.func.vmap(m, 1, 1)(x)),
        (6, 3),
    ),
    "functional_gradient": (lambda: Around(mlp(), by_a_functional_gradient), (3,)),
    "compiled": (lambda: torch.compile(mlp(), backend="eager"), (3,)),
}
ONE_BY_ONE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | int, str]] = {
    "lstm": (
        lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True),
        (5, 3),
        r"vmap does not support model \(LSTM\)",
    ),
    "gru": (
        lambda: Around(nn.GRU(3, 4), time_first),
        (4, 3),
        r"vmap does not support model\.module \(GRU\)",
    ),
    "rnn": (lambda: nn.RNN(3, 4, batch_first=True), (5, 3), r"model \(RNN\)"),
    "gru_cell": (lambda: nn.GRUCell(3, 4), (3,), "vmap refuses it"),
    "sparse_embedding": (lambda: nn.Embedding(9, 4, sparse=True), 5, "Sparse"),
    "sparse_embedding_bag": (lambda: nn.EmbeddingBag(9, 4, sparse=True), 5, "Sparse"),
    "embedding_with_max_norm": (lambda: nn.Embedding(9, 4, max_norm=3.0), 5, "renorm"),
    "gradient_of_inputs": (lambda: Around(mlp(), by_its_gradient), (3,), "requires_grad_"),
    "writes": (lambda: Around(nn.Linear(3, 3), writes_into_a_buffer), (3,), "inplace"),
    "decides": (lambda: Around(nn.Linear(3, 3), decides), (3,), "control flow"),
}


def model_and_batch(
    make: Callable[[], nn.Module], shape: tuple[int, ...] | int, device: torch.device
) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = make().to(device).double()
    x = torch.randint(9, (4, shape)) if isinstance(shape, int) else torch.randn(4, *shape).double()
    return model, x.to(device), torch.rand(4).double().to(device)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_every_kind(kind, device):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "per_sample_gradients takes the samples one by one")
        assert_right(*model_and_batch(*KINDS[kind], device))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", ONE_BY_ONE)
def test_what_vmap_refuses_is_taken_one_by_one_and_says_so(kind):
    make, shape, reason = ONE_BY_ONE[kind]
    with pytest.warns(UserWarning, match=f"samples one by one, which is slow.*{reason}"):
        assert_right(*model_and_batch(make, shape, torch.device("cpu")))


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_table_that_lookups_renormalise_stays_as_it_is(is_trained, layer, device):
    model = nn.Sequential(layer(9, 4, max_norm=0.5), nn.Linear(4, 3)).to(device)
    table = model[0].weight.requires_grad_(is_trained)
    before = table.detach().clone()
    x, y = torch.arange(4, device=device).view(4, 1), torch.rand(4, device=device)
    with pytest.warns(UserWarning, match="one by one"):
        torchium.per_sample_gradients(model, squares, x, y)
    assert torch.equal(table, before)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_on_as_before(layer, device):
    """functional_call replaces the list of weights that a recurrent layer keeps."""
    model, x, y = model_and_batch(lambda: layer(3, 4, batch_first=True), (5, 3), device)
    with pytest.warns(UserWarning, match=layer.__name__):
        assert_right(model, x, y)
    for weight, parameter in zip(model._flat_weights, model.parameters(), strict=True):
        assert weight is parameter
    squares(model(x), y).backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_and_low_precision(dtype, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(device, dtype)
    x, y = torch.randn(5, 6, device=device, dtype=dtype), torch.randint(3, (5,), device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.float32):
        gradients = torchium.per_sample_gradients(model, F.cross_entropy, x, y)
    expected = reference_gradients(model.double(), F.cross_entropy, x.double(), y)
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype
        error = (gradient.double() - expected[name]).norm() / expected[name].norm()
        assert error < 0.05, name


# ---- nested inputs, targets and outputs


class Output(NamedTuple):
    logits: Tensor
    hidden: Tensor | None = None


class Language(nn.Module):
    """Takes keyword arguments, including a mask, and returns a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(9, 4), nn.Embedding(6, 4)
        self.out = nn.Linear(4, 3)

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, scale: Any = None, square: bool = False
    ) -> Output:
        x = self.table(tokens) + self.positions(torch.arange(tokens.shape[1])[None])
        x = x if mask is None else x * mask.unsqueeze(2)
        x = x if scale is None else x * scale["of"][0][:, None, None]
        return Output(self.out(x.square() if square else x).mean(1))


TOKENS = torch.randint(9, (5, 6), generator=torch.Generator().manual_seed(0))
MASK = (TOKENS > 2).double()
SCALE = torch.linspace(1, 2, 5, dtype=torch.float64)


@pytest.mark.parametrize(
    "inputs",
    [
        {"tokens": TOKENS},
        {"tokens": TOKENS, "mask": MASK, "square": True},
        {"tokens": TOKENS, "mask": None, "scale": {"of": [SCALE]}},
        (TOKENS, MASK),
        [TOKENS, None],
    ],
    ids=["keyword", "keywords", "nested", "tuple", "list"],
)
def test_nested_inputs_and_targets(inputs):
    targets = {"class": torch.tensor([0, 1, 2, 0, 1]), "weight": (SCALE,)}

    def loss(output: Output, target: Any) -> Tensor:
        return (F.cross_entropy(output.logits, target["class"]) * target["weight"][0]).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(Language().double(), inputs, targets, loss)


def test_mappings_are_keyword_arguments_and_targets_may_be_none():
    model = Language().double()

    def loss(output: Output, target: None) -> Tensor:
        return output.logits.square().sum()

    expected = reference_gradients(model, loss, {"tokens": TOKENS, "mask": MASK}, None)
    inputs = UserDict(tokens=TOKENS, mask=MASK)  # as a tokenizer returns
    found = torchium.per_sample_gradients(model, loss, inputs, None)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("masked", [False, True])
def test_language_models_of_transformers(name, attention, masked):
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, name)
    sizes = {
        "GPT2LMHeadModel": {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 6},
        "BertForMaskedLM": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
        "LlamaForCausalLM": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
    }[name]
    if not name.startswith("GPT2"):
        sizes["intermediate_size"] = 16
    torch.manual_seed(0)
    model = model_class(
        model_class.config_class(vocab_size=9, attn_implementation=attention, **sizes)
    )
    inputs = {"input_ids": TOKENS, "use_cache": False}
    if name.startswith("Bert"):
        del inputs["use_cache"]
    if masked:
        inputs["attention_mask"] = torch.ones_like(TOKENS).index_fill(1, torch.tensor([5]), 0)

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_right(model.double().eval(), inputs, TOKENS, loss)
