"""The factors of K-FAC, from capture to state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._capture import Capture, Use
from .._layers import MATRIX_KINDS, core_tensors, use_row, why_unsupported
from ._parameters import State, state_dtype

_FACTORS = ("A", "G")
_COUNTS = ("factor_updates", "root_failures")
_ROOTS = ("A_inverse", "G_inverse")
_EIGEN = ("A_eigenvectors", "G_eigenvectors", "A_eigenvalues", "G_eigenvalues")
FACTOR_KEYS = frozenset((*_FACTORS, *_COUNTS, *_ROOTS, *_EIGEN))


@dataclass
class FactorSums:
    """What the uses of a weight since the last step add up to."""

    A: Tensor
    G: Tensor
    samples: dict[int, int] = field(default_factory=dict)  # of each backward pass
    rows: int = 0


class FactorCapture(Capture):
    """Adds each use of a weight to the sums of its layer as soon as its gradient is there.

    ``loss_scale`` is a method of the optimizer, which it does not keep alive: what a scaler has
    multiplied the loss by, or None.
    """

    def __init__(
        self,
        wants: Callable[[dict[str, Tensor]], bool],
        loss_scale: Callable[[], Tensor | None],
    ) -> None:
        super().__init__(MATRIX_KINDS, wants)
        self._loss_scale = weakref.WeakMethod(loss_scale)
        self.sums: dict[Tensor, FactorSums] = {}
        # Order of A where there is state already: that of a weight, or one more for its bias.
        self.orders: dict[Tensor, int] = {}

    def problem(self, param: Tensor) -> str | None:
        """Why no layer preconditions the parameter; None: one does."""
        owners = self.owners.get(param)
        if not owners:
            return "in no module that has run"
        for module in owners:
            if why_unsupported(module, MATRIX_KINDS):
                return type(module).__name__
        weight = self.weight_beside(param)
        if weight is None or weight not in self._params or not weight.requires_grad:
            return "its weight is not trained"
        if len({getattr(module, "groups", 1) for module in self.owners[weight]}) > 1:
            return "used by convolutions of different groups"
        bias = self.joint_bias(weight)
        if param is not weight and (param is not bias or not self.has_room(weight)):
            return "not the one bias of its weight"
        if not self.completeness.incomplete.isdisjoint({weight, bias}):
            return "also used outside of its layer"
        return None

    def weight_beside(self, param: Tensor) -> Tensor | None:
        """The weight of the layer that has the parameter, which may be that weight, or None."""
        owners = self.owners.get(param)
        return owners[0]._parameters.get("weight") if owners else None

    def has_room(self, weight: Tensor) -> bool:
        """Whether the factors of the weight include its bias."""
        return self.orders.get(weight) != _fan_in(weight)

    def joint_bias(self, weight: Tensor) -> Tensor | None:
        """The bias that shares the factors of the weight: the same one wherever that is used."""
        owners = self.owners[weight]
        bias = owners[0]._parameters.get("bias")
        if bias is None or bias not in self._params or not bias.requires_grad:
            return None
        return bias if set(self.owners[bias]) == set(owners) else None

    def groups(self, weight: Tensor) -> int:
        return int(getattr(self.owners[weight][0], "groups", 1))

    def forget(self) -> None:
        super().forget()
        self.sums.clear()

    def _restart(self, param: Tensor, root: int) -> None:
        self.sums.pop(param, None)

    def _reached(self, name: str, use: Use) -> None:
        if name != "weight" or self.problem(use.params["weight"]) is not None:
            return
        weight = use.params["weight"]
        input, output_gradient = core_tensors(use.module, use.input, use.output_gradient)
        loss_scale = self._loss_scale()
        scale = None if loss_scale is None else loss_scale()
        if scale is not None:  # here, since the square of it may be too large
            scale = scale.to(output_gradient.device, non_blocking=True)
            output_gradient = output_gradient.to(state_dtype(weight)) / scale
        seen = weight in self.sums
        if not seen:
            self.sums[weight] = self._new_sums(weight)
        sums = self.sums[weight]
        torch.ops.torchium.kronecker_factors_update_(
            sums.A,
            sums.G,
            input,
            output_gradient,
            use=use_row(use.module, -1, -1, 0)[0],
            weight_shape=weight.shape,
            accumulate=seen,
        )
        # Several uses in one pass are of the same samples.
        samples = input.shape[0]
        sums.samples[use.root] = max(samples, sums.samples.get(use.root, 0))
        sums.rows += output_gradient.numel() // weight.shape[0]

    def _new_sums(self, weight: Tensor) -> FactorSums:
        groups = self.groups(weight)
        order = self.orders.get(weight)
        if order is None:
            order = _fan_in(weight) + (self.joint_bias(weight) is not None)
        options: Any = {"dtype": state_dtype(weight), "device": weight.device}
        fan_out = weight.shape[0] // groups
        return FactorSums(
            torch.empty(groups, order, order, **options),
            torch.empty(groups, fan_out, fan_out, **options),
        )


def _fan_in(weight: Tensor) -> int:
    return weight.numel() // weight.shape[0]


def root_keys(damping_split: str) -> tuple[str, ...]:
    """Keys of what the damped inverse of a layer is kept as."""
    return _EIGEN if damping_split == "exact" else _ROOTS


def fresh_factors(weight: Tensor, has_bias: bool, groups: int, damping_split: str) -> State:
    """State of a layer that has seen nothing."""
    A, G, *roots, factor_updates, root_failures = torch.ops.torchium.kfac_init_state(
        weight, has_bias=has_bias, groups=groups, damping_split=damping_split
    )
    state = {"A": A, "G": G, "factor_updates": factor_updates, "root_failures": root_failures}
    return state | dict(zip(root_keys(damping_split), roots, strict=False))


def saved_factors(weight: Tensor, saved: dict[str, Any], damping_split: str) -> State:
    """State of the layer that ``saved`` may be of: its module is not known yet.

    ``A``, or a root of it, tells the number of groups, and whether there is a row for a bias.
    """
    groups, has_bias = 1, False
    A = next((saved[key] for key in ("A", "A_inverse", "A_eigenvectors") if key in saved), None)
    if weight.dim() in (2, 4) and isinstance(A, Tensor) and A.dim() == 3:
        has_bias = A.shape[-1] == _fan_in(weight) + 1
        if A.shape[0] > 0 and weight.shape[0] % A.shape[0] == 0:
            groups = A.shape[0]
    return fresh_factors(weight, has_bias, groups, damping_split)
