"""What the layers saw in the batch of a natural gradient step, as the operators and the state hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._capture.layers import ALL_KINDS, LayerCall, LayerKind, core_tensors, use_row
from .parameters import State

_TENSORS = ("inputs", "output_gradients")
ON_CPU = ("uses", "use_eps")  # keys of state that stays there
_ROW = 12  # integers of a call at the boundary of an operator


@dataclass(frozen=True, eq=False)
class _BatchCall:
    weight: Tensor | None  # None: absent, or without a gradient from this call
    bias: Tensor | None
    input: Tensor
    output_gradient: Tensor
    row: list[int]  # positions of weight and bias left out (-1)
    eps: float


@dataclass(frozen=True, eq=False)
class Batch:
    """All uses of a batch, and what a scaler multiplied its loss by."""

    calls: list[_BatchCall]
    loss_scale: Tensor | None

    @property
    def samples(self) -> int:
        return sum({call.row[3]: call.input.shape[0] for call in self.calls}.values())

    @staticmethod
    def of(
        passes: Sequence[Sequence[LayerCall]], params: Iterable[Tensor], loss_scale: Tensor | None
    ) -> Batch:
        """What some backward passes, each of other samples, have brought to ``params``."""
        active = set(params)
        calls = []
        for micro_batch, one_pass in enumerate(passes):
            for call in one_pass:
                reached = {
                    name: param
                    for name, param in call.params.items()
                    if name in call.reached and param in active
                }
                if reached:
                    tensors = core_tensors(call.module, call.input, call.output_gradient)
                    row, eps = use_row(call.module, -1, -1, micro_batch)
                    weight, bias = reached.get("weight"), reached.get("bias")
                    calls.append(_BatchCall(weight, bias, *tensors, row, eps))
        return Batch(calls, loss_scale)

    def arguments(
        self, params: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[int], list[float]]:
        """Inputs, output gradients, rows and eps of the uses, for a call on ``params``."""
        index: dict[Tensor | None, int] = {p: i for i, p in enumerate(params)}
        inputs, output_gradients, rows, eps = [], [], [], []
        for call in self.calls:
            weight, bias = index.get(call.weight, -1), index.get(call.bias, -1)
            inputs.append(call.input)
            output_gradients.append(call.output_gradient)
            rows += [call.row[0], weight, bias, *call.row[3:]]
            eps.append(call.eps)
        return inputs, output_gradients, rows, eps

    # ---- in the state of the parameters

    def state(self, params: Sequence[Tensor]) -> dict[Tensor, State]:
        """The batch as state of the weight of each use (or its bias); ``params`` are all there are.

        Of the j-th use of a parameter: ``inputs.j`` and ``output_gradients.j``, as captured but not
        scaled; row j of ``uses`` [J, 13] (kind, weight, bias, micro-batch, eight settings, place among
        all uses) and entry j of ``use_eps`` [J], both on the CPU. Weight and bias are positions in
        ``params``.
        """
        index: dict[Tensor | None, int] = {p: i for i, p in enumerate(params)}
        of_owner: defaultdict[Tensor, list[tuple[int, _BatchCall]]] = defaultdict(list)
        for place, call in enumerate(self.calls):
            owner = call.bias if call.weight is None else call.weight
            assert owner is not None
            of_owner[owner].append((place, call))
        result: dict[Tensor, State] = {}
        for owner, calls in of_owner.items():
            rows = [
                [u.row[0], index.get(u.weight, -1), index.get(u.bias, -1), *u.row[3:], place]
                for place, u in calls
            ]
            result[owner] = {
                "uses": torch.tensor(rows, device="cpu"),
                "use_eps": torch.tensor(
                    [u.eps for _, u in calls], dtype=torch.float64, device="cpu"
                ),
            }
            for j, (_, call) in enumerate(calls):
                result[owner][f"inputs.{j}"] = call.input.clone()
                result[owner][f"output_gradients.{j}"] = self._unscaled(call.output_gradient)
        return result

    def _unscaled(self, output_gradient: Tensor) -> Tensor:
        """A copy of its own; in float32 where 16 bits may be too few for it."""
        if self.loss_scale is None:
            return output_gradient.clone()
        dtype = torch.promote_types(output_gradient.dtype, torch.float32)
        return output_gradient.to(dtype) / self.loss_scale

    @staticmethod
    def from_state(
        params: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> Batch | None:
        """The batch that :meth:`state` described; None: there is none."""
        found: dict[int, _BatchCall] = {}
        for param in params:
            state = states.get(param, {})
            if "uses" not in state:
                continue
            eps = state["use_eps"].tolist()
            for j, (*row, place) in enumerate(state["uses"].tolist()):
                weight, bias = (params[i] if i >= 0 else None for i in row[1:3])
                found[place] = _BatchCall(
                    weight, bias, state[f"inputs.{j}"], state[f"output_gradients.{j}"], row, eps[j]
                )
        if not found:
            return None
        return Batch([found[place] for place in sorted(found)], None)


def is_batch_key(key: str) -> bool:
    """Whether the entry of the state of a parameter belongs to a batch."""
    return key in ON_CPU or key.split(".")[0] in _TENSORS


def fresh_batch(param: Tensor, saved: dict[str, Any], params: int, name: str) -> State:
    """Room for the part of a batch in ``saved``: ``uses``, once it is checked, tells what belongs to it.

    ``params`` is the number of parameters of the optimizer.
    """
    rows = saved.get("uses")
    if not isinstance(rows, Tensor) or not _are_uses(rows, params):
        raise ValueError(
            f"'uses' of {name} in state_dict must be an int64 tensor [J, {_ROW + 1}] of layers of the "
            f"optimizer, got {rows!r}"
        )
    fresh = {
        "uses": torch.empty_like(rows, device="cpu"),
        "use_eps": torch.empty(len(rows), dtype=torch.float64, device="cpu"),
    }
    for j, (kind, *_) in enumerate(rows.tolist()):
        input, output_gradient = (f"{tensors}.{j}" for tensors in _TENSORS)
        gradient = fresh[output_gradient] = _room(saved.get(output_gradient), torch.float32, param)
        dtype = torch.int64 if kind == LayerKind.EMBEDDING else torch.float32
        values = _room(saved.get(input), dtype, param)
        fresh[input] = values.new_empty(
            gradient.shape[:1] + values.shape[1:]
        )  # equally many samples
    return fresh


def _room(value: Any, dtype: torch.dtype, param: Tensor) -> Tensor:
    """An empty tensor for ``value``, if that is a dense tensor and as ``dtype`` is."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        if value.is_floating_point() == dtype.is_floating_point:
            dtype = value.dtype
        return torch.empty_like(value, dtype=dtype, device=param.device)
    return torch.empty(0, dtype=dtype, device=param.device)


def _are_uses(rows: Tensor, params: int) -> bool:
    """Whether the numbers are those of layers whose parameters there are."""
    if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] != _ROW + 1:
        return False
    return all(
        kind in ALL_KINDS and min(weight, bias) >= -1 and 0 <= max(weight, bias) < params
        for kind, weight, bias, *_ in rows.tolist()
    )
