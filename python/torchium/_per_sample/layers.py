"""The layer calls of one pass over the batch, from which per-sample gradients follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from .._capture.layers import (
    LayerKind,
    call_row,
    core_row,
    core_tensors,
    why_unsupported,
)
from .formulas import formula_of, rows_by_formula
from .recorder import NAMES, RecordedCall, Recorder, record
from .sample_loss import SampleLoss
from .samplewise import is_samplewise, samplewise_layers, summed_losses


@dataclass(slots=True)
class LayerCall:
    """One call of a layer, with the sample in dimension 0."""

    module: nn.Module
    params: dict[str, int]  # its trained parameters, as positions in those of the model
    input: Tensor
    output_gradient: Tensor
    has_batches: bool = False  # whether a sample is a batch of its own, in dimension 1


class LayerCalls:
    """Layer calls, for the operators of the core. These see the parameters at ``positions``; None: all."""

    def __init__(self, params: list[Tensor], positions: Iterable[int] | None = None) -> None:
        self._places = None if positions is None else {p: i for i, p in enumerate(positions)}
        self.params = params if self._places is None else [params[p] for p in self._places]
        #: The gradients of the other parameters, by position.
        self.early_rows: dict[int, Tensor] = {}
        self._calls: list[LayerCall] = []
        # As the operators take them.
        self._inputs: list[Tensor] = []
        self._output_gradients: list[Tensor] = []
        self._rows: list[int] = []
        self._eps: list[float] = []

    def add(self, call: LayerCall) -> None:
        self._calls.append(call)

    def run(self, operator: Any, **options: Any) -> Any:
        """The result of one of the operators ``torch.ops.torchium.per_sample_...``."""
        with torch.no_grad():
            for call in self._calls:
                self._convert(call)
            self._calls.clear()
            return operator(
                self.params,
                self._inputs,
                self._output_gradients,
                self._rows,
                self._eps,
                **options,
            )

    def _convert(self, call: LayerCall) -> None:
        module, params = call.module, call.params
        if self._places is not None:
            params = {name: self._places[position] for name, position in params.items()}
        input, output_gradient = call.input, call.output_gradient
        if formula_of(module) is not None:
            found = rows_by_formula(module, params, input, output_gradient, call.has_batches)
            for name, rows in found.items():
                self.add_rows(params[name], rows)
        elif (
            type(module) is nn.Linear and input.dim() > 1
        ):  # what call_row() and core_tensors() return
            settings = core_row(
                LayerKind.LINEAR, params.get("weight", -1), params.get("bias", -1), 0, []
            )
            self._append(input, output_gradient, settings, 0.0)
        else:
            row, eps = call_row(module, params.get("weight", -1), params.get("bias", -1), 0)
            for image, gradient in _images(module, input, output_gradient, call.has_batches):
                self._append(*core_tensors(module, image, gradient), row, eps)

    def add_rows(self, position: int, rows: Tensor) -> None:
        """Explicit gradients: those of the bias of a layer norm with such an output gradient."""
        row = core_row(LayerKind.LAYER_NORM, -1, position, 0, [rows.dim() - 1])
        self._append(rows, rows, row, 0.0)

    def _append(self, input: Tensor, output_gradient: Tensor, row: list[int], eps: float) -> None:
        self._inputs.append(input)
        self._output_gradients.append(output_gradient)
        self._rows += row
        self._eps.append(eps)


# Writes the gradients of all samples: one tensor [samples, *shape] per parameter of the calls.
WriteRows = Callable[[LayerCalls], list[Tensor]]


def layer_calls(loss: SampleLoss, write_rows: WriteRows | None = None) -> LayerCalls | None:
    """The layer calls of the loss of each sample.

    None if layer calls do not suffice: other modules have parameters, or a parameter is used outside
    its layer. With ``write_rows``, some may be written during the backward pass: ``early_rows``.
    """
    try:
        return _calls_of_batch(loss, write_rows) or _calls_under_vmap(loss, write_rows)
    except torch.OutOfMemoryError:
        if write_rows is None:
            raise
    return layer_calls(loss)  # the rows may fit when the backward pass has freed its memory


def _calls_of_batch(loss: SampleLoss, write_rows: WriteRows | None) -> LayerCalls | None:
    """The same by an ordinary pass; None: the samples have to be followed through the model."""
    layers = samplewise_layers(loss.model)
    if layers is None or not loss.inputs.is_tensor:
        return None
    params = list(loss.parameters.values())
    positions = {id(p): i for i, p in enumerate(params)}
    calls: list[RecordedCall] = []
    x = loss.inputs.tensors[0]
    with torch.enable_grad():
        for layer in layers:
            own = {n: positions[id(p)] for n, p in layer._parameters.items() if id(p) in positions}
            if not is_samplewise(layer, x) or (own and not _is_known(layer)):
                return None
            if not calls and getattr(layer, "inplace", False):
                x = x.clone()  # perhaps a view of the inputs
            input, x = x, layer(x)
            if own:
                calls.append(record(layer, own, input, x, has_batches=False))
        if not calls or _overwritten(calls):
            return None
        losses = _losses_of(loss, x, calls)
        return None if losses is None else _differentiated(params, calls, losses, write_rows)


def _losses_of(loss: SampleLoss, output: Tensor, calls: list[RecordedCall]) -> Tensor | None:
    """The losses or their sum; None if they depend on parameters otherwise than by the output."""
    if loss.targets.is_tensor:
        total = summed_losses(loss.loss_fn, output, loss.targets.tensors[0])
        if total is not None:
            return total
    losses = vmap(loss.of_output, randomness="error")(output, tuple(loss.targets.tensors))
    return None if _uses_outside(losses, calls, loss.parameters.values()) else losses


def _calls_under_vmap(loss: SampleLoss, write_rows: WriteRows | None) -> LayerCalls | None:
    """The same by following the samples through any model."""
    model, params = loss.model, list(loss.parameters.values())
    trainable = set(params)
    layers = [m for m in model.modules() if not trainable.isdisjoint(_own_parameters(m))]
    if not all(_is_known(layer) for layer in layers) or _has_backward_hooks(model):
        return None
    # Copies, so that no optimizer hook sees these gradients, and the model may change its weights.
    own = [p.detach().clone().requires_grad_() for p in params]
    recorder = Recorder(layers, own, len(loss.tensors[0]))

    def recorded_loss(sample: tuple[Tensor, ...]) -> Tensor:
        recorder.begin()
        return loss(own, sample)

    with torch.enable_grad(), recorder, attention_for_vmap(loss.tensors[0].device):
        losses = vmap(recorded_loss, randomness="error")(tuple(loss.tensors))
        if not recorder.complete or losses.grad_fn is None or not recorder.calls:
            return None
        # The model's own parameters, kept by reference: the vmap(grad) path raises the error.
        if _overwritten(recorder.calls) or _uses_outside(losses, recorder.calls, [*own, *params]):
            return None
        return _differentiated(params, recorder.calls, losses, write_rows)


def attention_for_vmap(device: torch.device) -> AbstractContextManager[None]:
    """On a CPU vmap batches one implementation of scaled_dot_product_attention and loops over others."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()


def _uses_outside(losses: Tensor, calls: list[RecordedCall], params: Iterable[Tensor]) -> bool:
    """Whether losses depend on a parameter otherwise than by these calls."""
    if losses.grad_fn is None:
        return False
    found = leaves(losses.grad_fn, {call.output_edge.node: call.input_edge for call in calls})
    return not found.isdisjoint(params)


def _differentiated(
    params: list[Tensor],
    calls: list[RecordedCall],
    losses: Tensor,
    write_rows: WriteRows | None,
) -> LayerCalls:
    """The calls with the gradients of their outputs."""
    edges = [call.output_edge for call in calls]
    gradients: tuple[Tensor | None, ...] = (None,) * len(calls)
    early: dict[int, Tensor] = {}
    if losses.requires_grad:
        ones = torch.ones_like(losses) if losses.dim() else None
        hooks = [] if write_rows is None else _hooks_for_rows(params, calls, write_rows, early)
        try:
            gradients = torch.autograd.grad(losses, edges, ones, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
    if not early:
        return _for_core(LayerCalls(params), calls, gradients)
    late = LayerCalls(params, [i for i in range(len(params)) if i not in early])
    late.early_rows = early
    left = [early.keys().isdisjoint(call.params.values()) for call in calls]
    return _for_core(late, compress(calls, left), compress(gradients, left))


def _hooks_for_rows(
    params: list[Tensor],
    calls: list[RecordedCall],
    write_rows: WriteRows,
    early: dict[int, Tensor],
) -> list[RemovableHandle]:
    """Hooks that write rows into ``early`` as soon as the backward pass knows an output gradient.

    A GPU writes them while the host goes on. Left for later are parameters of several calls, formulas
    of users, which may not expect autograd's thread, and calls before which no gradient is needed.
    """
    large = [call for call in calls if _has_large_rows(params, call)]
    if not large:
        return []
    uses = Counter(i for call in calls for i in call.params.values())

    def hook_of(call: RecordedCall) -> Callable[[tuple[Tensor | None, ...]], None]:
        def write(gradients: tuple[Tensor | None, ...]) -> None:
            positions = call.params.values()
            gradient = gradients[call.output_edge.output_nr]
            # The late operator raises an error again, unless there is memory by then.
            with suppress(Exception):
                only = _for_core(LayerCalls(params, positions), [call], [gradient])
                early.update(zip(positions, write_rows(only), strict=True))

        return write

    return [
        call.output_edge.node.register_prehook(hook_of(call))
        for call in large
        if all(uses[i] == 1 for i in call.params.values()) and formula_of(call.module) is None
    ]


def _has_large_rows(params: list[Tensor], call: RecordedCall) -> bool:
    """Whether a GPU takes longer to write the rows of a call than the host to launch their operator."""
    if not call.input.is_cuda:
        return False
    return len(call.input) * sum(params[i].nbytes for i in call.params.values()) >= 2**26


def _own_parameters(module: nn.Module) -> list[Tensor]:
    return [p for p in module._parameters.values() if p is not None]


def _has_backward_hooks(model: nn.Module) -> bool:
    """Whether a module may change gradients, which no layer call shows."""
    return any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())


def _is_known(layer: nn.Module) -> bool:
    has_formula = formula_of(layer) is not None
    if not has_formula and why_unsupported(layer) is not None:
        return False
    for name, p in layer._parameters.items():
        if p is None or not p.requires_grad:
            continue
        if not ((has_formula or name in NAMES) and p.dtype.is_floating_point and p.dim() > 0):
            return False
    return True


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


def _overwritten(calls: list[RecordedCall]) -> bool:
    """Whether the model has changed a layer's input in place, which autograd does not allow."""
    return any(call.input._version != call.input_version for call in calls)


def _for_core(
    result: LayerCalls, calls: Iterable[RecordedCall], gradients: Iterable[Tensor | None]
) -> LayerCalls:
    for call, gradient in zip(calls, gradients, strict=True):
        if gradient is None:  # the loss does not depend on this output
            gradient = torch.zeros((), device=call.input.device).expand(call.output_shape)
        if gradient.shape != call.output_shape:
            gradient = gradient.reshape(call.output_shape)
        input = call.input.detach()
        result.add(LayerCall(call.module, call.params, input, gradient, call.has_batches))
    return result


def _images(
    module: nn.Module, input: Tensor, output_gradient: Tensor, has_batches: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Input and output gradient; one pair per image where a sample is a batch of images."""
    has_images = isinstance(module, nn.GroupNorm) or (
        isinstance(module, _ConvNd) and input.dim() == len(module.kernel_size) + 3
    )
    if not (has_batches and has_images):
        yield input, output_gradient
        return
    yield from zip(input.unbind(1), output_gradient.unbind(1), strict=True)
