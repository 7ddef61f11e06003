"""KFAC with a weight that is an embedding and a head: found in every form, and beneficial."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torchium
from cuda_waits import no_waits
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH = 40, 8


class LanguageModel(nn.Module):
    """Predicts the next word, with the lookup table as head."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        nn.init.normal_(self.table.weight, std=WIDTH**-0.5)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.table(words))))


def sentences(step: int) -> Tensor:
    """[8, 11]: each word mostly determines the next; some start more sentences than others."""
    generator = torch.Generator().manual_seed(step)
    frequency = 1 / torch.arange(1.0, WORDS + 1)
    words = [torch.multinomial(frequency, 8, replacement=True, generator=generator)]
    for _ in range(10):
        random = torch.multinomial(frequency, 8, replacement=True, generator=generator)
        follows = torch.rand(8, generator=generator) < 0.8
        words.append(torch.where(follows, (5 * words[-1] + 7) % WORDS, random))
    return torch.stack(words, 1)


def word_loss(model: nn.Module, words: Tensor) -> Tensor:
    outputs = model(words[:, :-1])
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def make(bias: bool = False) -> LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LanguageModel(bias)


def train(model: nn.Module, optimizer, first: int, last: int) -> list[float]:
    losses = []
    device = next(model.parameters()).device
    for step in range(first, last):
        optimizer.zero_grad()
        loss = word_loss(model, sentences(step).to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal_models(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_every_form_finds_the_weight_at_its_first_use(bias, device):
    """From parameters, the embedding runs before the head is known."""
    models = []
    for form in (lambda m: m, nn.Module.named_parameters, nn.Module.parameters):
        model = make(bias).to(device)
        optimizer = torchium.KFAC(form(model), TCov=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, 0, 3)
        state = optimizer.state[model.table.weight]
        assert state["factor_updates"] == 3
        assert state["A"].shape == (1, WIDTH + bias, WIDTH + bias)
        assert state["G"].shape == (1, WORDS)
        assert optimizer.report()["fallback"] == []
        models.append(model)
    for other in models[1:]:
        assert_equal_models(models[0], other)


def test_the_lookups_are_in_the_factors():
    """A word that is looked up but never a target."""
    model = make()
    optimizer = torchium.KFAC(model, TCov=1)
    words = torch.tensor([[3, 4], [3, 5]])
    F.cross_entropy(model(words).flatten(0, 1)[:, 10:], torch.arange(4)).backward()
    optimizer.step()
    assert optimizer.report()["diagonal_G"] == ["table.weight"]
    G = optimizer.state[model.table.weight]["G"][0]
    assert [i for i in range(10) if G[i] > 0] == [3, 4, 5]
    torch.testing.assert_close(G[3], 2 * G[4])


def test_a_large_vocabulary_is_named_with_its_diagonal():
    model = make()
    optimizer = torchium.KFAC(model, TCov=1, max_factor_size=10)
    with pytest.warns(UserWarning, match=r"a factor G: table.weight \(40\)"):
        train(model, optimizer, 0, 1)


def test_nothing_is_captured_where_no_factors_are_due():
    model = make()
    optimizer = torchium.KFAC(model, TCov=3)
    for step in range(7):
        optimizer.zero_grad()
        word_loss(model, sentences(step)).backward()
        assert bool(optimizer._plan.core.recorded()) == (step % 3 == 0)
        optimizer.step()
        assert not optimizer._plan.core.recorded()
    assert optimizer.state[model.table.weight]["factor_updates"] == 3


@pytest.mark.parametrize("form", [lambda m: m, nn.Module.parameters], ids=["model", "parameters"])
def test_a_table_that_is_not_tied_has_the_frequencies_of_its_words(form, device):
    """It stays small: never [words, words]. The warning for large factors does not name it."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    optimizer = torchium.KFAC(form(model.to(device)), TCov=1, max_factor_size=WIDTH + 1)
    words = torch.tensor([[3, 5], [3, 4]], device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.cross_entropy(model(words).sum(1), torch.arange(2, device=device)).backward()
        optimizer.step()
    state = optimizer.state[model[0].weight]
    expected = torch.zeros(WORDS, device=device)
    expected[[3, 4, 5]] = torch.tensor([0.5, 0.25, 0.25], device=device)
    torch.testing.assert_close(state["G"], expected[None])
    assert state["A"].shape == (1, WIDTH, WIDTH)
    treatments = list(optimizer.report()["parameters"].values())
    assert treatments[0] == ("diagonal", f"A {WIDTH}, the diagonal of G {WORDS}")
    assert not model[0].weight.grad[0].any()
    assert optimizer.report()["fallback"] == []


class Positions(nn.Module):
    """A table of words, and one of positions."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(10, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.rows = rows

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(words) + self.positions(self.rows(words))))


ROWS = {
    "vector": lambda words: torch.arange(10),
    "one_row": lambda words: torch.arange(10)[None],
    "expanded": lambda words: torch.arange(10).expand(len(words), 10),
}


@pytest.mark.parametrize("rows", ROWS)
def test_rows_that_samples_share_fall_back(rows):
    model = Positions(ROWS[rows])
    optimizer = torchium.KFAC(model, TCov=1)
    why = "looked up for positions that samples share"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 0, 3)
    report = optimizer.report()
    if rows == "expanded":
        assert not caught
        assert report["fallback"] == []
    else:
        assert [f"1 ({why}: positions.weight)" in str(w.message) for w in caught] == [True]
        assert report["fallback"] == ["positions.weight"]
        assert report["parameters"]["positions.weight"] == ("fallback", why)
    assert "words.weight" in report["preconditioned"]


def test_tokens_may_be_the_samples_of_the_layers():
    """Looked up as [N, T], multiplied as [N T]."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Flatten(0, 1), nn.Linear(WIDTH, WORDS))
    optimizer = torchium.KFAC(model, TCov=1)
    words = sentences(0)
    F.cross_entropy(model(words), words.flatten()).backward()
    optimizer.step()
    assert optimizer.report()["fallback"] == []


def test_a_head_may_see_fewer_rows_than_there_are_samples():
    """For example if only masked words are predicted."""
    model = make()
    optimizer = torchium.KFAC(model, TCov=1)
    for step in range(3):
        optimizer.zero_grad()
        words = sentences(step)
        hidden = torch.tanh(model.mix(model.table(words)))
        F.cross_entropy(model.head(hidden[::3, 4]), words[::3, 5]).backward()
        optimizer.step()
    assert optimizer.state[model.table.weight]["factor_updates"] == 3
    assert "table.weight" in optimizer.report()["preconditioned"]


def test_lookups_of_a_gradient_that_was_dropped_do_not_count():
    models = []
    for dropped in (True, False):
        model = make()
        optimizer = torchium.KFAC(model, TCov=1)
        for step in range(3):
            if dropped:
                word_loss(model, sentences(50 + step)).backward()
                for p in model.parameters():
                    p.grad = None
            word_loss(model, sentences(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_equal_models(*models)


def test_a_checkpoint_of_a_weight_without_factors_loads():
    """From an earlier version, in which such a weight took SGD steps."""
    model = make()
    optimizer = torchium.KFAC(model, TCov=2)
    train(model, optimizer, 0, 4)
    saved = optimizer.state_dict()
    place = [id(p) for p in model.parameters()].index(id(model.table.weight))
    state = saved["state"][place]
    saved["state"][place] = {key: state[key] for key in ("step", "momentum_buffer")}
    loaded = torchium.KFAC(model, TCov=2)
    loaded.load_state_dict(saved)
    assert "A" not in loaded.state[model.table.weight]
    train(model, loaded, 4, 6)
    assert loaded.state[model.table.weight]["factor_updates"] == 1
    assert loaded.report()["fallback"] == []


@pytest.mark.parametrize("split", ["pi", "exact"])
def test_a_checkpoint_goes_on(split):
    model = make(bias=True)
    optimizer = torchium.KFAC(model, TCov=2, TInv=3, damping_split=split)
    train(model, optimizer, 0, 3)
    other = copy.deepcopy(model)
    loaded = torchium.KFAC(other.named_parameters(), TCov=2, TInv=3, damping_split=split)
    loaded.load_state_dict(optimizer.state_dict())
    for m, o in ((model, optimizer), (other, loaded)):
        train(m, o, 3, 7)
    assert_equal_models(model, other)


def test_autocast_changes_only_the_rounding(device):
    states = []
    for enabled in (False, True):
        model = make().to(device)
        optimizer = torchium.KFAC(model, TCov=1)
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            loss = word_loss(model, sentences(0).to(device))
        loss.backward()
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            optimizer.step()
        states.append(optimizer.state[model.table.weight])
    for key in ("A", "G"):
        assert states[1][key].dtype == torch.float32
        error = (states[1][key] - states[0][key]).norm()
        assert 0 < error < 0.02 * states[0][key].norm()


@pytest.mark.cuda
def test_the_host_does_not_wait_for_the_lookups():
    model = make().to("cuda")
    optimizer = torchium.KFAC(model, TCov=1, TInv=100)
    train(model, optimizer, 0, 3)
    words = sentences(3).to("cuda")
    optimizer.zero_grad()
    with no_waits() as asleep:
        word_loss(model, words).backward()
        optimizer.step()
    assert not asleep.query()
    torch.cuda.synchronize()
    assert optimizer.state[model.table.weight]["factor_updates"] == 4


def test_a_compiled_model_has_the_same_factors():
    models = []
    for compiled in (True, False):
        model = make()
        optimizer = torchium.KFAC(model, TCov=1)
        train(torch.compile(model, backend="eager") if compiled else model, optimizer, 0, 3)
        assert "table.weight" in optimizer.report()["preconditioned"]
        models.append(model)
    assert_equal_models(*models)


# ---- benefit


class Untied(torchium.KFAC):
    """Leaves the table to SGD with momentum."""

    def _wants(self) -> bool:
        super()._wants()
        tables = [p for group in self.param_groups for p in group["params"] if p.shape[0] == WORDS]
        self._capture.due -= {id(table) for table in tables}
        return bool(self._capture.due)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).train()


@pytest.mark.filterwarnings("ignore:KFAC preconditions")
@pytest.mark.parametrize("build", [make, gpt2])
@pytest.mark.parametrize("split", ["pi", "exact"])
def test_40_steps_end_below_those_of_the_fallback(build, split, device):
    ends = []
    for cls in (torchium.KFAC, Untied):
        model = build().to(device)
        optimizer = cls(model, lr=0.03, damping=0.03, damping_split=split)
        ends.append(sum(train(model, optimizer, 0, 40)[-5:]) / 5)
    assert ends[0] < 0.95 * ends[1], ends


# Tied weights of several designs in transformers: an encoder with a bias, an encoder and a decoder with a
# shared table, rotary positions.
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
DESIGNS: dict[str, tuple[dict[str, Any], str]] = {
    "BertForMaskedLM": (
        SMALL | {"num_hidden_layers": 1, "max_position_embeddings": 16},
        "bert.embeddings.word_embeddings.weight",
    ),
    "T5ForConditionalGeneration": (
        {
            "vocab_size": WORDS,
            "d_model": WIDTH,
            "d_kv": 4,
            "d_ff": 8,
            "num_layers": 1,
            "num_heads": 2,
        }
        | {"decoder_start_token_id": 0},
        "shared.weight",
    ),
    "LlamaForCausalLM": (
        SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 1, "tie_word_embeddings": True},
        "model.embed_tokens.weight",
    ),
}


@pytest.mark.filterwarnings("ignore:KFAC preconditions")
@pytest.mark.parametrize("name", DESIGNS)
def test_tied_weights_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    options, weight = DESIGNS[name]
    cls = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(cls.config_class(**options))
    optimizer = torchium.KFAC(model, TCov=1)
    for step in range(2):
        optimizer.zero_grad()
        model(input_ids=sentences(step), labels=sentences(step)).loss.backward()
        optimizer.step()
    assert weight in optimizer.report()["preconditioned"]
    assert weight in optimizer.report()["diagonal_G"]
