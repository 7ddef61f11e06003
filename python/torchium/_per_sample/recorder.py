"""Records the calls of layers, in a forward pass of all samples or under ``vmap``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._compile import _disable_dynamo
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._capture.arguments import gets_input_alone, layer_input
from .._capture.layers import computed_output

NAMES = ("weight", "bias")


@dataclass(slots=True)
class RecordedCall:
    """One layer call in the forward pass. Dimension 0 of input and output is the sample."""

    module: nn.Module
    params: dict[str, int]  # "weight" and "bias", if trainable: positions in the parameters
    input: Tensor
    input_version: int
    output_edge: GradientEdge
    output_shape: torch.Size
    has_batches: bool  # whether a sample is a batch, as a layer under vmap receives it

    @property
    def input_edge(self) -> GradientEdge | None:
        """Where the graph goes on before the layer, unless the input has been overwritten."""
        return get_gradient_edge(self.input) if self.input.requires_grad else None


def record(
    module: nn.Module, params: dict[str, int], input: Tensor, output: Tensor, has_batches: bool
) -> RecordedCall:
    """A call whose output has a gradient."""
    return RecordedCall(
        module,
        params,
        input,
        input._version,
        _edge_of(computed_output(output)),
        output.shape,
        has_batches,
    )


def _edge_of(output: Tensor) -> GradientEdge:
    """``get_gradient_edge()``, in a third of its time where a node of PyTorch has computed the output."""
    node = output.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


class Recorder:
    """Forward hooks on the layers, within a ``with`` block, for a pass under ``vmap``.

    Only vmap knows which dimension of a tensor is the sample. Recorded are the tensors that it has
    batched, which have a graph of their own.
    """

    def __init__(self, layers: list[nn.Module], params: list[Tensor], samples: int) -> None:
        self.calls: list[RecordedCall] = []
        self.complete = True  # False: a layer ran in a way that cannot be recorded
        self.level = 0  # of the vmap over the samples
        self._layers = layers
        self._samples = samples
        self._positions = {p: i for i, p in enumerate(params)}

    def __enter__(self) -> Recorder:
        self._handles = [
            layer.register_forward_hook(self._after_forward, prepend=True, with_kwargs=True)
            for layer in self._layers
        ]
        return self

    def __exit__(self, *args: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """Called inside of the vmap over the samples."""
        self.level = _functorch.maybe_current_level() or 0

    @_disable_dynamo
    def _after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """Records a call. Returns what takes the place of the output; None: nothing."""
        value, dim = self._batched(output)
        # At another level a transform in the model itself runs the layer.
        is_other = _functorch.maybe_current_level() != self.level or not value.requires_grad
        if is_other or not gets_input_alone(module, args, kwargs):
            self.complete = False
            return None
        if is_replaced := dim != 0 or value._is_view():
            if dim is None:  # all samples share the output
                value = value.expand(self._samples, *value.shape).clone()
            else:
                # Not a view: an in-place change of a view removes its node from the graph.
                value = value.movedim(dim, 0)
                value = torch.ops.aten._unsafe_view(value, value.shape)
        self._record(module, layer_input(args, kwargs), value)
        if not is_replaced:
            return None
        result: Tensor = _functorch._add_batch_dim(value, 0, self.level)
        return result

    def _batched(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """What vmap has batched, and the dimension of the samples; None: all share the tensor."""
        if _functorch.maybe_get_level(tensor) != self.level:
            return tensor, None
        return _functorch.get_unwrapped(tensor), _functorch.maybe_get_bdim(tensor)

    def _record(self, module: nn.Module, input: Tensor, output: Tensor) -> None:
        own = {name: module._parameters.get(name) for name in (*NAMES, *module._parameters)}
        if any(getattr(module, name, None) is not param for name, param in own.items()):
            self.complete = False  # a computed weight, perhaps from parameters
        if any(
            p is not None and p.requires_grad and p not in self._positions for p in own.values()
        ):
            self.complete = False  # by functional_call in the model
        params = {n: self._positions[p] for n, p in own.items() if p in self._positions}
        value, dim = self._batched(input)
        if dim is None:
            value = value.expand(self._samples, *value.shape)
        elif dim != 0:
            value = value.movedim(dim, 0)
        self.calls.append(record(module, params, value, output, has_batches=True))
