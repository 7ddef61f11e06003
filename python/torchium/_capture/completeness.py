"""Finds gradients that come from elsewhere than the recorded uses of a parameter.

A weight may be used outside of the module that owns it (``F.linear(x, embedding.weight)``), where no
module hook sees it. So the gradient of the recorded uses is compared with the one that reaches the
parameter: the first time, and whenever the graph of the backward pass has another number of operators
with the parameter than there are recorded uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .layers import MATRIX_KINDS, LayerCall, layer_kind, summed_gradient

# Relative to the product of the norms of inputs and output gradients, as rounding errors are.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
_TOLERANCE_TF32 = 2e-3
_TOLERANCE_LOW = 2e-2


class CompletenessCheck:
    """Compares recorded gradients with the parameter's own, where that is not known already.

    Once a comparison has found no difference, a gradient is complete as long as the graph of the
    backward pass has no other operators with the parameter than the recorded uses.
    """

    def __init__(self) -> None:
        # Of each running graph task: how many operators of its graph take a parameter.
        self._edges: dict[int, dict[Tensor, int]] = {}
        # Gradients on their way to .grad, with how many operators and uses the parameter has, by
        # parameter and graph task: of several threads at once.
        self._arrived: dict[tuple[Tensor, int], tuple[tuple[int, int], Tensor]] = {}
        # Of each comparison: the parameter, these counts, and the difference and what may be
        # rounding [2].
        self._results: list[tuple[Tensor, tuple[int, int], Tensor]] = []
        self._verified: set[Tensor] = set()  # parameters with a comparison that found no difference
        # Parameters with counts for which one was found.
        self._failed: set[tuple[Tensor, tuple[int, int]]] = set()
        # Since forget(): parameters with recorded uses, and those with other gradients too.
        self._seen: set[Tensor] = set()
        self._with_others: set[Tensor] = set()
        # Parameters that have gradients from elsewhere than their recorded uses, as of the last
        # passes in which they had uses.
        self.incomplete: set[Tensor] = set()

    def arrive(
        self, param: Tensor, task: int, calls: int, gradient: Tensor, params: Iterable[Tensor]
    ) -> None:
        """Keeps what the graph task is about to add to ``.grad``, if it must be compared.

        ``params`` are all whose gradients may arrive; ``uses`` is how many of this one are recorded.
        """
        if task not in self._edges:
            watched = list(params)
            edges = torch.ops.torchium.backward_pass_edges(watched)
            self._edges[task] = dict(zip(watched, edges, strict=True))
        operators = self._edges[task].get(param, 0)
        counts = operators, calls
        if param not in self._seen and operators == calls:  # unless a comparison finds otherwise
            self.incomplete.discard(param)
        self._seen.add(param)
        if (param, counts) in self._failed:
            self._with_others.add(param)
            self.incomplete.add(param)
        elif operators != calls or param not in self._verified:
            # .grad takes its memory, and other threads add to that.
            self._arrived[param, task] = counts, gradient.detach().clone()

    def compare(self, param: Tensor, task: int, calls: list[LayerCall]) -> None:
        """Compares the gradient that the graph task brought with that of its uses, if need be."""
        found = self._arrived.pop((param, task), None)
        if found is None:
            return
        counts, arrived = found
        with torch.no_grad():
            difference, bound = (
                arrived.to(torch.float64),
                arrived.new_zeros((), dtype=torch.float64),
            )
            for call in calls:
                difference = difference - summed_gradient(
                    call.module, param, call.input, call.output_gradient
                )
                bound = bound + _tolerance(param, call) * _scale(param, call)
            norms = torch.stack([torch.linalg.vector_norm(difference), bound])
            self._results.append((param, counts, norms))

    def resolve(self) -> None:
        """Brings ``incomplete`` up to date with the comparisons since the last call.

        Waits for the device if there are any: in the first steps of a parameter, and where its
        gradient may come from elsewhere.
        """
        results, self._results = self._results, []
        if not results:
            return
        device = results[0][2].device
        norms = torch.stack([norms.to(device) for *_, norms in results]).tolist()
        for (param, counts, _), (difference, bound) in zip(results, norms, strict=True):
            if not math.isfinite(difference) or not math.isfinite(bound):
                continue  # the step is skipped; the next gradient tells
            self.incomplete.discard(param)
            if difference > bound:
                self._failed.add((param, counts))
                self._with_others.add(param)
            elif counts[0] == counts[1]:
                self._verified.add(param)
        self.incomplete |= self._with_others

    def end(self, task: int) -> None:
        """Forgets what only the graph task needed."""
        self._edges.pop(task, None)
        for key in [key for key in self._arrived if key[1] == task]:
            del self._arrived[key]

    def forget(self) -> None:
        """Forgets what has arrived and what has been compared."""
        self._edges.clear()
        self._arrived.clear()
        self._results.clear()
        self._seen.clear()
        self._with_others.clear()


def _tolerance(param: Tensor, call: LayerCall) -> float:
    dtypes = {param.dtype, call.output_gradient.dtype}
    if call.input.is_floating_point():
        dtypes.add(call.input.dtype)
    if not dtypes <= _TOLERANCE.keys():
        return _TOLERANCE_LOW
    if param.is_cuda and torch.float32 in dtypes:
        return _TOLERANCE_TF32
    return max(_TOLERANCE[dtype] for dtype in dtypes)


def _scale(param: Tensor, call: LayerCall) -> Tensor:
    """A bound of the gradient: norm of the output gradient times that of what it is multiplied by."""
    gradient: Tensor = torch.linalg.vector_norm(call.output_gradient, dtype=torch.float64)
    if param is call.params.get("weight") and layer_kind(call.module) in MATRIX_KINDS:
        input: Tensor = torch.linalg.vector_norm(call.input, dtype=torch.float64)
        patch = math.prod(param.shape[2:])  # each entry of an image is in so many patches
        return gradient * input * math.sqrt(patch)
    return gradient * math.sqrt(call.output_gradient.numel())
