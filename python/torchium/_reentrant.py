"""Reentrant checkpoints, whose gradients exist only within ``backward()``."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

# torch.utils.checkpoint and what others derive from it.
_REENTRANT = "CheckpointFunctionBackward"


def refuse_reentrant_checkpoints(function: str, *results: Tensor) -> None:
    """ValueError if the graph of a result has a reentrant checkpoint.

    Its node has edges to the inputs of the segment alone. ``torch.autograd.grad`` takes the gradients
    of parameters within for zero, without an error unless it has to pass the node.
    """
    seen: set[Node] = set()
    waiting = [each.grad_fn for each in results]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == _REENTRANT:
            raise ValueError(
                f"{function}: the model uses torch.utils.checkpoint with use_reentrant=True, within which "
                "parameters have no gradients but by backward(); pass use_reentrant=False"
            )
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
