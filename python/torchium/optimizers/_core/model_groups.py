"""Parameter groups of a model, by kind of layer."""

from __future__ import annotations

from typing import Any

from torch import nn


def model_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: parameters of embeddings, with ``preconditioned=False``, and all others.

    A head that shares the parameters of an embedding does not change that. Empty groups are left out.
    """
    embeddings = {
        param
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for param in module.parameters()
    }
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in named if p not in embeddings]},
        {"params": [(name, p) for name, p in named if p in embeddings], "preconditioned": False},
    ]
    return [group for group in groups if group["params"]]
