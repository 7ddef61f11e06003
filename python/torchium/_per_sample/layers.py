"""The layer calls of one pass over the batch, from which per-sample gradients follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import vmap

from .._capture.layers import call_row, layer_input, padded, why_unsupported

SampleLoss = Callable[[dict[str, Tensor], tuple[Tensor, ...]], Tensor]
_NAMES = ("weight", "bias")


@dataclass
class LayerCalls:
    """Layer calls as the operators of the core take them."""

    params: list[Tensor]
    inputs: list[Tensor] = field(default_factory=list)
    output_gradients: list[Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    eps: list[float] = field(default_factory=list)

    def run(self, operator: Any, **options: Any) -> Any:
        """The result of one of the operators ``torch.ops.torchium.per_sample_...``."""
        with torch.no_grad():
            return operator(
                self.params, self.inputs, self.output_gradients, self.rows, self.eps, **options
            )


@dataclass
class _Call:
    """One layer call in the forward pass. Dimension 0 of input and output is the sample."""

    module: nn.Module
    params: dict[str, int]  # "weight" and "bias", if trainable: positions in the parameters
    input: Tensor
    input_version: int
    input_edge: GradientEdge | None
    output_edge: GradientEdge
    output_shape: torch.Size


class _Tap(torch.autograd.Function):
    """Passes a layer's batched tensors under vmap to a recorder, and returns ``output``.

    Only vmap knows which dimension of a tensor is the sample; it passes that to the static method
    ``vmap``. ``index`` has one value per sample, so the method is also called for a layer that all
    samples share.
    """

    @staticmethod
    def forward(
        recorder: _Recorder, module: nn.Module, index: Tensor, input: Tensor, output: Tensor
    ) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, gradient

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        recorder: _Recorder,
        module: nn.Module,
        index: Tensor,
        input: Tensor,
        output: Tensor,
    ) -> tuple[Tensor, int | None]:
        _, _, of_samples, input_dim, output_dim = in_dims
        if (
            of_samples is None or not output.requires_grad
        ):  # a vmap of the model itself, or no graph
            recorder.complete = False
            return output, output_dim
        # Not a view: an in-place change of a view removes its node from the graph.
        if output_dim is None:
            output = output.expand(info.batch_size, *output.shape).clone()
        else:
            output = output.movedim(output_dim, 0)
            output = torch.ops.aten._unsafe_view(output, output.shape)
        if input_dim is None:
            input = input.expand(info.batch_size, *input.shape)
        else:
            input = input.movedim(input_dim, 0)
        recorder.record(module, input, output)
        return output, 0


class _Recorder:
    """Forward hooks on the layers, within a ``with`` block."""

    def __init__(self, layers: list[nn.Module], params: list[Tensor]) -> None:
        self.calls: list[_Call] = []
        self.complete = True  # False: a layer ran in a way that cannot be recorded
        self.index: Tensor | None = None  # of the sample, under vmap
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
    ) -> Tensor:
        result: Tensor = _Tap.apply(self, module, self.index, layer_input(args, kwargs), output)
        return result

    def record(self, module: nn.Module, input: Tensor, output: Tensor) -> None:
        own = {name: module._parameters.get(name) for name in _NAMES}
        if any(getattr(module, name, None) is not param for name, param in own.items()):
            self.complete = False  # a computed weight, perhaps from parameters
        if any(
            p is not None and p.requires_grad and p not in self._positions for p in own.values()
        ):
            self.complete = False  # by functional_call in the model
        params = {n: self._positions[p] for n, p in own.items() if p in self._positions}
        input_edge = get_gradient_edge(input) if input.requires_grad else None
        self.calls.append(
            _Call(
                module,
                params,
                input.detach(),
                input._version,
                input_edge,
                get_gradient_edge(output),
                output.shape,
            )
        )


def layer_calls(
    model: nn.Module,
    sample_loss: SampleLoss,
    parameters: dict[str, Tensor],
    tensors: list[Tensor],
) -> LayerCalls | None:
    """The layer calls of ``sample_loss(parameters, sample)`` for each sample.

    ``parameters`` are the trainable ones of ``model``, and dimension 0 of ``tensors`` is the sample.
    None if layer calls do not suffice: other modules have parameters, or a parameter is used outside
    its layer.
    """
    trainable = set(parameters.values())
    layers = [m for m in model.modules() if not trainable.isdisjoint(_own_parameters(m))]
    if not all(_is_known(layer) for layer in layers) or _has_backward_hooks(model):
        return None
    # Copies, so that no optimizer hook sees these gradients, and the model may change its weights.
    own = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad(), _Recorder(layers, list(own.values())) as recorder:

        def recorded_loss(index: Tensor, sample: tuple[Tensor, ...]) -> Tensor:
            recorder.index = index
            return sample_loss(own, sample)

        indices = torch.arange(len(tensors[0]), device=tensors[0].device)
        losses = vmap(recorded_loss, randomness="error")(indices, tuple(tensors))
    calls = recorder.calls
    if not recorder.complete or losses.grad_fn is None or not calls:
        return None
    used_outside = leaves(
        losses.grad_fn, {call.output_edge.node: call.input_edge for call in calls}
    )
    # The model's own parameters, kept by reference: the vmap(grad) path raises the error.
    if not used_outside.isdisjoint([*own.values(), *parameters.values()]) or _overwritten(calls):
        return None
    edges = [call.output_edge for call in calls]
    gradients = torch.autograd.grad(losses, edges, torch.ones_like(losses), allow_unused=True)
    return _for_core(list(parameters.values()), calls, gradients)


def _own_parameters(module: nn.Module) -> list[Tensor]:
    return [p for p in module._parameters.values() if p is not None]


def _has_backward_hooks(model: nn.Module) -> bool:
    """Whether a module may change gradients, which no layer call shows."""
    return any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())


def _is_known(layer: nn.Module) -> bool:
    trainable = {n: p for n, p in layer._parameters.items() if p is not None and p.requires_grad}
    return (
        why_unsupported(layer) is None
        and trainable.keys() <= set(_NAMES)
        and all(p.is_floating_point() for p in trainable.values())
    )


def leaves(root: Node, inputs: Mapping[Node, GradientEdge | None]) -> set[Tensor]:
    """The leaves that the graph reaches. From a node of ``inputs`` only its edge is followed."""
    found: set[Tensor] = set()
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
            variable = getattr(node, "variable", None)
            if variable is not None:
                found.add(variable)
        waiting += following
    return found


def _overwritten(calls: list[_Call]) -> bool:
    """Whether the model has changed a layer's input in place, which autograd does not allow."""
    return any(call.input._version != call.input_version for call in calls)


def _for_core(
    params: list[Tensor], calls: list[_Call], gradients: tuple[Tensor | None, ...]
) -> LayerCalls:
    result = LayerCalls(params)
    for call, gradient in zip(calls, gradients, strict=True):
        if gradient is None:  # the loss does not depend on this output
            gradient = torch.zeros((), device=call.input.device).expand(call.output_shape)
        row, eps = call_row(
            call.module, call.params.get("weight", -1), call.params.get("bias", -1), 0
        )
        for input, output_gradient in _as_core_takes(call, gradient):
            result.inputs.append(padded(call.module, input))
            result.output_gradients.append(output_gradient)
            result.rows += row
            result.eps.append(eps)
    return result


def _as_core_takes(call: _Call, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Input and output gradient; one pair per image where a sample is a batch of images."""
    module, input = call.module, call.input
    has_images = isinstance(module, nn.GroupNorm) or (
        isinstance(module, nn.Conv2d) and input.dim() == 5
    )
    if not has_images:
        yield input, gradient
        return
    yield from zip(input.unbind(1), gradient.unbind(1), strict=True)
