"""The projections within ``nn.MultiheadAttention``, which calls no modules for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_attention(module: nn.Module) -> bool:
    """Whether linear layers of the module are calls of functions."""
    return isinstance(module, nn.MultiheadAttention)


def calls_functions(module: nn.Module) -> bool:
    """Whether an attention runs PyTorch's own forward pass, which calls no module."""
    is_own = type(module).forward is nn.MultiheadAttention.forward
    return is_own and "forward" not in module.__dict__


def time_first_layers(module: nn.Module) -> list[nn.Module]:
    """The modules within a transformer module that get ``[positions, samples, width]``."""
    stacks = nn.TransformerEncoder, nn.TransformerDecoder
    layer = module.layers[0] if isinstance(module, stacks) and len(module.layers) else module
    known = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    if not isinstance(layer, known) or getattr(layer.self_attn, "batch_first", True):
        return []
    return list(module.modules())


def projections(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The modules that own the weights of its linear layers."""
    return module, module.out_proj  # type: ignore[return-value]


def samples_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The size of the batch of a call; 0: the hook was not given the query.

    The projections get ``[positions, samples, width]``, also with ``batch_first``.
    """
    query = args[0] if args else kwargs.get("query")
    if not isinstance(query, Tensor) or query.is_nested or query.dim() not in (2, 3):
        return 0
    return 1 if query.dim() == 2 else query.size(0 if module.batch_first else 1)
