"""Models of transformers, made from small configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from learnable_data import CLASSES, images, sentences, texts
from task import Batch, Size, Task
from torch import Tensor, nn

Build = Callable[[Size], Task]


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """These models compute their loss themselves."""
    (inputs,) = batch
    loss: Tensor = model(**inputs).loss
    return loss


def _made(config: str, model: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made.train()


def bert(size: Size) -> Task:
    """A classifier of padded texts."""
    vocabulary, width = size.of(60, 2_000), size.of(8, 64)
    model = _made(
        "BertConfig",
        "BertForSequenceClassification",
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=size.of(1, 2),
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    batches = [
        ({"input_ids": words, "attention_mask": (words != 0).long(), "labels": targets},)
        for words, targets in texts(vocabulary, size.of(6, 24), 16)
    ]
    return Task(model, batches, _own_loss, fall=0.05)


def _language_task(model: nn.Module, vocabulary: int, size: Size) -> Task:
    words = sentences(vocabulary, size.of(6, 32), size.of(8, 16))
    batches = [({"input_ids": batch, "labels": batch},) for batch in words]
    return Task(model, batches, _own_loss, fall=0.02)


def gpt2(size: Size) -> Task:
    """Head and embedding are tied, and Conv1D is in place of linear layers."""
    vocabulary = size.of(60, 2_000)
    model = _made(
        "GPT2Config",
        "GPT2LMHeadModel",
        vocab_size=vocabulary,
        n_embd=size.of(8, 64),
        n_layer=size.of(1, 2),
        n_head=2,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language_task(model, vocabulary, size)


def llama(size: Size) -> Task:
    """RMSNorm, rotary positions, gated layers, fewer heads of keys than of queries."""
    vocabulary, width = size.of(60, 2_000), size.of(8, 64)
    model = _made(
        "LlamaConfig",
        "LlamaForCausalLM",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=size.of(1, 2),
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return _language_task(model, vocabulary, size)


def t5(size: Size) -> Task:
    """Encoder and decoder with one table of words, and biases of relative positions."""
    vocabulary, width = size.of(60, 2_000), size.of(8, 64)
    model = _made(
        "T5Config",
        "T5ForConditionalGeneration",
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // 2,
        d_ff=2 * width,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    batches = [
        ({"input_ids": words[:, :-1], "labels": words[:, 1:].contiguous()},)
        for words in sentences(vocabulary, size.of(6, 24), 8)
    ]
    return Task(model, batches, _own_loss, fall=0.02)


def vit(size: Size) -> Task:
    side = size.of(8, 32)
    model = _made(
        "ViTConfig",
        "ViTForImageClassification",
        image_size=side,
        patch_size=4,
        hidden_size=size.of(8, 64),
        num_hidden_layers=size.of(1, 2),
        num_attention_heads=2,
        intermediate_size=size.of(16, 128),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    batches = [
        ({"pixel_values": pixels, "labels": targets},) for pixels, targets in images(3, side, 8)
    ]
    return Task(model, batches, _own_loss)


KINDS: dict[str, Build] = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit}
