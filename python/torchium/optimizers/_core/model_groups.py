"""Parameter groups of a model, by what is best for each kind of layer."""

from __future__ import annotations

from typing import Any

from torch import nn


def model_groups(model: nn.Module) -> list[dict[str, Any]]:
    """One group of all named parameters, each once, but for those of embeddings.

    They are a second group, with ``preconditioned=False``, also where a head shares them. A group
    without parameters is left out.
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
