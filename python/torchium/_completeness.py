"""Finds gradients that come from elsewhere than the recorded uses of a parameter.

A weight may be used outside of the module that owns it (``F.linear(x, embedding.weight)``), where no
module hook sees it. So once for each parameter, the gradient of the recorded uses is compared with the
one that reaches the parameter.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from ._layers import MATRIX_KINDS, layer_kind, summed_gradient

if TYPE_CHECKING:
    from ._capture import Use

# Relative to the product of the norms of inputs and output gradients, as rounding errors are.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
_TOLERANCE_TF32 = 2e-3
_TOLERANCE_LOW = 2e-2


class CompletenessCheck:
    """Compares, once for each parameter, recorded gradients with the parameter's own."""

    def __init__(self) -> None:
        self._handles: dict[Tensor, RemovableHandle] = {}  # of parameters still to be compared
        # Gradients on their way to .grad, by parameter and graph task: of several threads at once.
        self._arrived: dict[tuple[Tensor, int], Tensor] = {}
        # Of each comparison: the parameter, and the difference and what may be rounding [2].
        self._results: list[tuple[Tensor, Tensor]] = []
        # Parameters that have gradients from elsewhere than their recorded uses.
        self.incomplete: set[Tensor] = set()

    def begin(self, param: Tensor) -> RemovableHandle:
        """Starts to look at the gradients of the parameter."""
        check, key = weakref.ref(self), weakref.ref(param)

        @_disable_dynamo
        def hook(gradient: Tensor) -> None:
            this, target = check(), key()
            if this is not None and target is not None:
                task = torch._C._current_graph_task_id()
                # .grad takes its memory, and other threads add to that.
                this._arrived[target, task] = gradient.detach().clone()

        handle: RemovableHandle = param.register_hook(hook)
        _move_to_front(param, handle)
        self._handles[param] = handle
        return handle

    def compare(self, param: Tensor, task: int, uses: list[Use]) -> None:
        """Compares the gradient that the graph task brought with that of its uses, if there are any."""
        arrived = self._arrived.pop((param, task), None)
        if arrived is None or not uses or param not in self._handles:
            return
        with torch.no_grad():
            difference, bound = (
                arrived.to(torch.float64),
                arrived.new_zeros((), dtype=torch.float64),
            )
            for use in uses:
                difference = difference - summed_gradient(
                    use.module, param, use.input, use.output_gradient
                )
                bound = bound + _tolerance(param, use) * _scale(param, use)
            self._results.append(
                (param, torch.stack([torch.linalg.vector_norm(difference), bound]))
            )

    def resolve(self) -> None:
        """Adds to ``incomplete`` what the comparisons since the last call came to.

        Waits for the device if there are any: in the first steps of a parameter.
        """
        results, self._results = self._results, []
        if not results:
            return
        device = results[0][1].device
        norms = torch.stack([norms.to(device) for _, norms in results]).tolist()
        for (param, _), (difference, bound) in zip(results, norms, strict=True):
            if not math.isfinite(difference) or not math.isfinite(bound):
                continue  # the step is skipped; the next gradient tells
            handle = self._handles.pop(param, None)
            if handle is not None:
                handle.remove()
            if difference > bound:
                self.incomplete.add(param)

    def forget(self) -> None:
        """Forgets what has arrived and what has been compared."""
        self._arrived.clear()
        self._results.clear()


def _move_to_front(param: Tensor, handle: RemovableHandle) -> None:
    """The hook must see what arrives, not what hooks of the user make of it."""
    hooks = param._backward_hooks
    assert hooks is not None
    others = {key: hook for key, hook in hooks.items() if key != handle.id}
    for key in others:
        del hooks[key]
    hooks.update(others)


def _tolerance(param: Tensor, use: Use) -> float:
    dtypes = {param.dtype, use.output_gradient.dtype}
    if use.input.is_floating_point():
        dtypes.add(use.input.dtype)
    if not dtypes <= _TOLERANCE.keys():
        return _TOLERANCE_LOW
    if param.is_cuda and torch.float32 in dtypes:
        return _TOLERANCE_TF32
    return max(_TOLERANCE[dtype] for dtype in dtypes)


def _scale(param: Tensor, use: Use) -> Tensor:
    """A bound of the gradient: norm of the output gradient times that of what it is multiplied by."""
    gradient: Tensor = torch.linalg.vector_norm(use.output_gradient, dtype=torch.float64)
    if param is use.params.get("weight") and layer_kind(use.module) in MATRIX_KINDS:
        input: Tensor = torch.linalg.vector_norm(use.input, dtype=torch.float64)
        patch = math.prod(param.shape[2:])  # each entry of an image is in so many patches
        return gradient * input * math.sqrt(patch)
    return gradient * math.sqrt(use.output_gradient.numel())
