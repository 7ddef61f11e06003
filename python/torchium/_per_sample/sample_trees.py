"""Nested batches of samples: tensors in dicts, tuples and lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten


class SampleTree:
    """A tensor, or tensors in dicts, tuples and lists, whose dimension 0 is the sample.

    Values of the types ``shared`` are also allowed; all samples share them.
    """

    def __init__(self, name: str, value: Any, shared: tuple[type, ...]) -> None:
        if isinstance(value, PackedSequence):
            raise ValueError(
                f"{name} is a PackedSequence, which has no batch dimension; pass the padded batch "
                "and the lengths, and pack them in the model"
            )
        # Other mappings (a tokenizer's result) would be a single leaf.
        value = dict(value) if isinstance(value, Mapping) else value
        #: Whether it is a tensor alone.
        self.is_tensor = isinstance(value, Tensor)
        paths: list[tuple[tuple[Any, ...], Any]] = [((), value)]
        if not self.is_tensor:
            paths, self._spec = tree_flatten_with_path(value)
        self._leaves = [leaf for _, leaf in paths]
        #: The tensors, with their names in messages.
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.have_gradients: list[bool] = []  # those given
        for path, leaf in paths:
            where = name if self.is_tensor else name + keystr(path)
            if isinstance(leaf, Tensor):
                if leaf.dim() == 0:
                    raise ValueError(
                        f"{where} must have a batch dimension; it has shape () and dtype "
                        f"{leaf.dtype}"
                    )
                self.tensors.append(leaf.detach())
                self.names.append(where)
                self.have_gradients.append(leaf.requires_grad)
            elif not isinstance(leaf, shared):
                raise ValueError(
                    f"{where} must be a tensor with a batch dimension; it is of type "
                    f"{type(leaf).__name__}"
                )

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """The same tree with other tensors."""
        if self.is_tensor:
            return tensors[0]
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)


def count_samples(inputs: SampleTree, targets: SampleTree, least: int) -> int:
    """The number of samples; ValueError if tensors disagree or there are less than ``least``, 0 or 1."""
    names, tensors = inputs.names + targets.names, inputs.tensors + targets.tensors
    if not inputs.tensors:
        raise ValueError("inputs must hold a tensor with a batch dimension; there is none")
    counts = [tensor.shape[0] for tensor in tensors]
    for name, count in zip(names, counts, strict=True):
        if count != counts[0]:
            raise ValueError(
                f"{names[0]} holds {counts[0]} samples and {name} {count}; there must be equally "
                "many (expand what all samples share)"
            )
    if counts[0] < least:
        raise ValueError(f"{names[0]} holds 0 samples; there must be at least one")
    return counts[0]
