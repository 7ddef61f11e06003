"""What the layers saw in the batch of a natural gradient step, as the operators and the state hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._capture import Use
from .._layers import ALL_KINDS, core_tensors, samples, use_row
from ._parameters import State

_TENSORS = ("inputs", "output_gradients")
_ROW = 12  # integers of a use at the boundary of an operator


@dataclass(frozen=True, eq=False)
class _BatchUse:
    weight: Tensor | None  # None: absent, or without a gradient from this use
    bias: Tensor | None
    input: Tensor
    output_gradient: Tensor
    row: list[int]  # positions of weight and bias left out (-1)
    eps: float


@dataclass(frozen=True, eq=False)
class Batch:
    """All uses of a batch, its number of samples and what a scaler multiplied the loss by."""

    uses: list[_BatchUse]
    samples: int
    loss_scale: Tensor | None

    @staticmethod
    def of(passes: Sequence[Sequence[Use]], loss_scale: Tensor | None) -> Batch:
        """The batch of some backward passes, each of other samples."""
        uses = [
            _BatchUse(
                use.params["weight"] if "weight" in use.reached else None,
                use.params["bias"] if "bias" in use.reached else None,
                *core_tensors(use.module, use.input, use.output_gradient),
                *use_row(use.module, -1, -1, micro_batch),
            )
            for micro_batch, uses in enumerate(passes)
            for use in uses
        ]
        count = sum(samples(uses[0].module, uses[0].input) for uses in passes)
        return Batch(uses, count, loss_scale)

    def arguments(
        self, params: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[int], list[float]]:
        """Inputs, output gradients, rows and eps of the uses of ``params``."""
        index: dict[Tensor | None, int] = {p: i for i, p in enumerate(params)}
        inputs, output_gradients, rows, eps = [], [], [], []
        for use in self.uses:
            weight, bias = index.get(use.weight, -1), index.get(use.bias, -1)
            if weight < 0 and bias < 0:
                continue
            inputs.append(use.input)
            output_gradients.append(use.output_gradient)
            rows += [use.row[0], weight, bias, *use.row[3:]]
            eps.append(use.eps)
        return inputs, output_gradients, rows, eps

    # ---- in the state of the parameters

    def state(self, params: Sequence[Tensor]) -> dict[Tensor, State]:
        """The batch as state of the weight of each use (or its bias); ``params`` are all there are.

        Of the j-th use of a parameter: ``inputs.j`` and ``output_gradients.j``, as captured; row j of
        ``uses`` [J, 13] (kind, weight, bias, micro-batch, eight settings, place among all uses) and
        entry j of ``use_eps`` [J], both on the CPU. Weight and bias are positions in ``params``.
        ``loss_scale``: 0-dim, what the output gradients are too large by.
        """
        index: dict[Tensor | None, int] = {p: i for i, p in enumerate(params)}
        of_owner: defaultdict[Tensor, list[tuple[int, _BatchUse]]] = defaultdict(list)
        for place, use in enumerate(self.uses):
            owner = use.bias if use.weight is None else use.weight
            assert owner is not None
            of_owner[owner].append((place, use))
        result: dict[Tensor, State] = {}
        for owner, uses in of_owner.items():
            rows = [
                [u.row[0], index.get(u.weight, -1), index.get(u.bias, -1), *u.row[3:], place]
                for place, u in uses
            ]
            one = torch.ones((), device=owner.device)
            result[owner] = {
                "uses": torch.tensor(rows),
                "use_eps": torch.tensor([u.eps for _, u in uses], dtype=torch.float64),
                "loss_scale": one if self.loss_scale is None else self.loss_scale.clone(),
            }
            for j, (_, use) in enumerate(uses):
                result[owner][f"inputs.{j}"] = use.input.clone()
                result[owner][f"output_gradients.{j}"] = use.output_gradient.clone()
        return result

    @staticmethod
    def from_state(
        params: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> Batch | None:
        """The batch that :meth:`state` described; None: there is none."""
        found: dict[int, _BatchUse] = {}
        loss_scale = None
        for param in params:
            state = states.get(param, {})
            if "uses" not in state:
                continue
            loss_scale = state["loss_scale"]
            eps = state["use_eps"].tolist()
            for j, (*row, place) in enumerate(state["uses"].tolist()):
                weight, bias = (params[i] if i >= 0 else None for i in row[1:3])
                found[place] = _BatchUse(
                    weight, bias, state[f"inputs.{j}"], state[f"output_gradients.{j}"], row, eps[j]
                )
        if not found:
            return None
        uses = [found[place] for place in sorted(found)]
        sizes = {use.row[3]: use.input.shape[0] for use in uses}
        return Batch(uses, sum(sizes.values()), loss_scale)


def is_batch_key(key: str) -> bool:
    """Whether the entry of the state of a parameter belongs to a batch."""
    return key in ("uses", "use_eps", "loss_scale") or key.split(".")[0] in _TENSORS


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
        "use_eps": torch.empty(len(rows), dtype=torch.float64),
        "loss_scale": torch.empty((), device=param.device),
    }
    for key in (f"{kind}.{j}" for kind in _TENSORS for j in range(len(rows))):
        value = saved.get(key)
        like = value if isinstance(value, Tensor) and value.layout == torch.strided else rows
        fresh[key] = torch.empty_like(like, device=param.device)
    return fresh


def _are_uses(rows: Tensor, params: int) -> bool:
    """Whether the numbers are those of layers whose parameters there are."""
    if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] != _ROW + 1:
        return False
    return all(
        kind in ALL_KINDS and -1 <= min(weight, bias) and 0 <= max(weight, bias) < params
        for kind, weight, bias, *_ in rows.tolist()
    )
