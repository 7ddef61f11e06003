"""Gradients of single samples from what the layers of a model see in one pass over the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves

from ._layers import computed_output, core_tensors, layer_input, samples, use_row, why_unsupported


@dataclass
class _Use:
    """One use of a layer in the forward pass."""

    module: nn.Module
    params: dict[str, int]  # "weight" and "bias", where trainable: positions in the parameters
    input: Tensor
    input_edge: GradientEdge | None
    output_edge: GradientEdge
    output_shape: torch.Size


class _Recorder:
    """Forward hooks on the layers, while it is entered."""

    def __init__(self, layers: list[nn.Module], params: list[Tensor]) -> None:
        self.uses: list[_Use] = []
        self.complete = True  # False: a layer ran where no graph was recorded
        self._layers = layers
        self._positions = {p: i for i, p in enumerate(params)}

    def __enter__(self) -> _Recorder:
        self._handles = [
            layer.register_forward_hook(self._after_forward, prepend=True, with_kwargs=True)
            for layer in self._layers
        ]
        return self

    def __exit__(self, *args: object) -> None:
        for handle in self._handles:
            handle.remove()

    @_disable_dynamo
    def _after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if not output.requires_grad:
            self.complete = False
            return
        input = layer_input(args, kwargs)
        params = {
            name: self._positions[param]
            for name in ("weight", "bias")
            if (param := module._parameters.get(name)) is not None and param in self._positions
        }
        input_edge = get_gradient_edge(input) if input.requires_grad else None
        output_edge = get_gradient_edge(computed_output(output))
        self.uses.append(
            _Use(module, params, input.detach(), input_edge, output_edge, output.shape)
        )


def layer_gradients(
    model: nn.Module,
    sample_loss: Callable[[Any, Tensor], Tensor],
    parameters: dict[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
) -> dict[str, Tensor] | None:
    """Gradients of ``sample_loss(output, target)`` of each sample, name -> [batch, *shape].

    ``parameters`` are the trainable ones. None where the layers do not tell: other layers have
    parameters, a parameter is used outside of its layer, or dimension 0 of what a layer receives is
    not the sample.
    """
    trainable = set(parameters.values())
    layers = [m for m in model.modules() if not trainable.isdisjoint(_own_parameters(m))]
    if any(why_unsupported(layer) for layer in layers):
        return None
    # Copies, so that gradients are computed by nothing else, and no hook of an optimizer sees them.
    own = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad(), _Recorder(layers, list(own.values())) as recorder:
        output = _call(model, own, inputs)
        if not recorder.complete or not _is_batch_of(len(inputs), output):
            return None
        losses = vmap(sample_loss, randomness="error")(output, targets)
    uses = recorder.uses
    if losses.grad_fn is None or not uses or _used_outside(losses.grad_fn, uses):
        return None
    if not _see_samples(model, layers, own, inputs, uses):
        return None
    edges = [use.output_edge for use in uses]
    ones = torch.ones_like(losses)
    gradients = torch.autograd.grad(losses, edges, ones, allow_unused=True)
    return dict(zip(own, _rows(list(own.values()), uses, gradients), strict=True))


def _own_parameters(module: nn.Module) -> list[Tensor]:
    return [p for p in module._parameters.values() if p is not None]


def _call(model: nn.Module, parameters: dict[str, Tensor], inputs: Tensor) -> Any:
    # Copies: a module that counts its calls in a buffer must not count this one.
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return functional_call(model, {**parameters, **buffers}, (inputs.detach(),))


def _is_batch_of(count: int, output: Any) -> bool:
    leaves = tree_leaves(output)
    return all(isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == count for t in leaves)


def _used_outside(root: Node, uses: list[_Use]) -> bool:
    """Whether the graph reaches a parameter by another way than through the layers."""
    inputs = {use.output_edge.node: use.input_edge for use in uses}
    seen: set[Node] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in inputs:
            edge = inputs[node]
            following = [] if edge is None else [edge.node]
        else:
            following = [n for n, _ in node.next_functions if n is not None]
            if hasattr(node, "variable"):
                return True
        waiting += following
    return False


def _see_samples(
    model: nn.Module,
    layers: list[nn.Module],
    parameters: dict[str, Tensor],
    inputs: Tensor,
    uses: list[_Use],
) -> bool:
    """Whether dimension 0 of what each layer receives is the sample.

    A layer that is fed from elsewhere, with positions for example, may receive as many rows by
    chance: a pass over one sample tells.
    """
    if any(samples(use.module, use.input) != len(inputs) for use in uses):
        return False
    storage = inputs.untyped_storage().data_ptr()
    sources = [use.input for use in uses if use.input_edge is None]
    if len(inputs) == 1 or all(s.untyped_storage().data_ptr() == storage for s in sources):
        return True
    with torch.enable_grad(), _Recorder(layers, list(parameters.values())) as recorder:
        _call(model, parameters, inputs[:1])
    return [use.module for use in recorder.uses] == [use.module for use in uses] and all(
        samples(use.module, use.input) == 1 for use in recorder.uses
    )


def _rows(
    params: list[Tensor], uses: list[_Use], gradients: tuple[Tensor | None, ...]
) -> list[Tensor]:
    inputs, output_gradients, rows, use_eps = [], [], [], []
    for use, gradient in zip(uses, gradients, strict=True):
        if gradient is None:  # the loss does not depend on this output
            gradient = torch.zeros((), device=use.input.device).expand(use.output_shape)
        gradient = gradient.reshape(use.output_shape)
        input, output_gradient = core_tensors(use.module, use.input, gradient)
        row, eps = use_row(use.module, use.params.get("weight", -1), use.params.get("bias", -1), 0)
        inputs.append(input)
        output_gradients.append(output_gradient)
        rows += row
        use_eps.append(eps)
    result: list[Tensor] = torch.ops.torchium.per_sample_gradients(
        params, inputs, output_gradients, rows, use_eps
    )
    return result
