"""The factors of K-FAC, from capture to state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._capture.capture import Capture
from ..._capture.layers import (
    MATRIX_KINDS,
    TIED_KINDS,
    LayerCall,
    LayerKind,
    computed_weight,
    core_tensors,
    has_transposed_weight,
    layer_kind,
    use_row,
    why_unsupported,
)
from .parameters import State, state_dtype

FACTORS = ("A", "G")
COUNT_KEYS = ("factor_updates", "root_failures")
_ROOTS = ("A_inverse", "G_inverse")
_EIGEN = ("A_eigenvectors", "G_eigenvectors", "A_eigenvalues", "G_eigenvalues")
FACTOR_KEYS = frozenset((*FACTORS, *COUNT_KEYS, *_ROOTS, *_EIGEN))


@dataclass
class FactorSums:
    """What the uses of a weight since the last step add up to."""

    A: Tensor  # [groups, a, a], or its diagonal [groups, a]
    G: Tensor
    samples: dict[int, int] = field(default_factory=dict)  # of each backward pass
    rows: int = 0

    def add(self, lookups: FactorSums) -> None:
        """Adds what the lookups of the weight as an embedding came to."""
        torch.ops.torchium.kronecker_factors_add_lookups_(
            self.A, self.G, lookups.A, lookups.G, rows=self.rows
        )


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
        super().__init__(TIED_KINDS, wants)
        self._loss_scale = weakref.WeakMethod(loss_scale)
        self.sums: dict[Tensor, FactorSums] = {}
        # Of weights as embeddings: A of the output gradients, and how often each row was looked up.
        self.lookups: dict[Tensor, FactorSums] = {}
        # Shapes of A and G where there is state already.
        self.shapes: dict[Tensor, tuple[torch.Size, torch.Size]] = {}
        # Largest order of a factor that is kept as a matrix.
        self.limits: dict[Tensor, int] = {}

    def problem(self, param: Tensor) -> str | None:
        """Why no layer preconditions the parameter; None: one does."""
        reason = self._problem_of_modules(param)
        if reason is not None:
            return reason
        weight = self.weight_beside(param)
        assert weight is not None
        if not self.completeness.incomplete.isdisjoint({weight, self.joint_bias(weight)}):
            return "also used outside of its layer"
        return None

    def _problem_of_modules(self, param: Tensor) -> str | None:
        owners = self.owners.get(param)
        if not owners:
            return "in no module that has run"
        reason = _problem_of_layers(owners)
        if reason is not None:
            return reason
        weight = self.weight_beside(param)
        if weight is None or weight not in self._params or not weight.requires_grad:
            return "its weight is not trained"
        if _problem_of_layers(self.owners[weight]) is not None:
            return "its weight falls back"
        if len({has_transposed_weight(module) for module in self.owners[weight]}) > 1:
            return "used as [in, out] and as [out, in]"
        if len({getattr(module, "groups", 1) for module in self.owners[weight]}) > 1:
            return "used by convolutions of different groups"
        bias = self.joint_bias(weight)
        if param is not weight and (param is not bias or not self.has_room(weight)):
            return "not the one bias of its weight"
        return None

    def weight_beside(self, param: Tensor) -> Tensor | None:
        """The weight of the layer that has the parameter, which may be that weight, or None."""
        owners = self.owners.get(param)
        return owners[0]._parameters.get("weight") if owners else None

    def has_room(self, weight: Tensor) -> bool:
        """Whether the factors of the weight include its bias."""
        known = self.shapes.get(weight)
        return known is None or known[0][-1] != _fan_in(self.matrix(weight))

    def joint_bias(self, weight: Tensor) -> Tensor | None:
        """The bias that shares the factors of the weight: the same one wherever that is used."""
        layers = [module for module in self.owners[weight] if not isinstance(module, nn.Embedding)]
        bias = layers[0]._parameters.get("bias") if layers else None
        if bias is None or bias not in self._params or not bias.requires_grad:
            return None
        return bias if set(self.owners[bias]) == set(layers) else None

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as [out, ...]: a view of that of a layer that has it as [in, out]."""
        transposed = has_transposed_weight(self.owners[weight][0])
        return weight.detach().mT if transposed else weight

    def groups(self, weight: Tensor) -> int:
        return int(getattr(self.owners[weight][0], "groups", 1))

    def may_be_in_products(self, weight: Tensor) -> bool:
        """Whether a layer that is no embedding owns the weight, or one may still be found."""
        owners = self.owners.get(weight, ())
        return self.is_searching() or not all(isinstance(m, nn.Embedding) for m in owners)

    def sums_of(self, weight: Tensor) -> FactorSums | None:
        """What the uses of a weight add up to; None: no product with it was seen."""
        sums = self.sums.get(weight)
        lookups = self.lookups.pop(weight, None)
        if sums is not None and lookups is not None:
            sums.add(lookups)
        return sums

    def forget(self) -> None:
        super().forget()
        self.sums.clear()
        self.lookups.clear()

    def _restart(self, param: Tensor, root: int) -> None:
        self.sums.pop(param, None)
        self.lookups.pop(param, None)

    def _reached(self, name: str, call: LayerCall) -> None:
        if name != "weight":
            return
        weight = call.params["weight"]
        if weight in self.completeness.incomplete or self._problem_of_modules(weight) is not None:
            return
        input, output_gradient = core_tensors(call.module, call.input, call.output_gradient)
        loss_scale = self._loss_scale()
        scale = None if loss_scale is None else loss_scale()
        if scale is not None:  # here, since the square of it may be too large
            scale = scale.to(output_gradient.device, non_blocking=True)
            output_gradient = output_gradient.to(state_dtype(weight)) / scale
        is_lookup = layer_kind(call.module) is LayerKind.EMBEDDING
        kept = self.lookups if is_lookup else self.sums
        seen = weight in kept
        if not seen:
            kept[weight] = self._new_sums(weight, is_lookup)
        sums = kept[weight]
        torch.ops.torchium.kronecker_factors_update_(
            sums.A,
            sums.G,
            input,
            output_gradient,
            call=use_row(call.module, -1, -1, 0)[0],
            weight_shape=self.matrix(weight).shape,
            accumulate=seen,
        )
        if is_lookup:
            return
        # Several uses in one pass are of the same samples.
        samples = input.shape[0]
        sums.samples[call.root] = max(samples, sums.samples.get(call.root, 0))
        sums.rows += output_gradient.numel() // self.matrix(weight).shape[0]

    def _new_sums(self, weight: Tensor, of_lookups: bool) -> FactorSums:
        options: Any = {"dtype": state_dtype(weight), "device": weight.device}
        A, G = self.shapes.get(weight) or self.new_shapes(weight)
        if of_lookups:
            words, width = weight.shape
            A, G = _factor_shape(1, width, len(A) == 2), _factor_shape(1, words, True)
        return FactorSums(torch.empty(A, **options), torch.empty(G, **options))

    def new_shapes(self, weight: Tensor) -> tuple[torch.Size, torch.Size]:
        """Shapes of the factors of a layer without any.

        Diagonals are those above its limit, and G of a head that is tied to an embedding.
        """
        groups, matrix, limit = self.groups(weight), self.matrix(weight), self.limits[weight]
        a = _fan_in(matrix) + (self.joint_bias(weight) is not None)
        o = matrix.shape[0] // groups
        is_tied = any(isinstance(module, nn.Embedding) for module in self.owners[weight])
        return _factor_shape(groups, a, a > limit), _factor_shape(groups, o, is_tied or o > limit)


def _problem_of_layers(modules: list[nn.Module]) -> str | None:
    """Why the weight of these layers has no factors; None: it has."""
    is_tied = not all(isinstance(module, nn.Embedding) for module in modules)
    kinds = TIED_KINDS if is_tied else MATRIX_KINDS
    for module in modules:
        how = computed_weight(module)
        if how is not None:
            return f"weight computed by {how}"
        why = why_unsupported(module, kinds)
        if why and why.startswith("has ") and is_tied and layer_kind(module) is LayerKind.EMBEDDING:
            return f"tied to an Embedding that {why}"
        if why:
            return " and ".join(dict.fromkeys(type(m).__name__ for m in modules))
    return None


def _fan_in(weight: Tensor) -> int:
    return weight.numel() // weight.shape[0]


def _factor_shape(groups: int, order: int, diagonal: bool) -> torch.Size:
    return torch.Size((groups, order) if diagonal else (groups, order, order))


def factors_fit(weight: Tensor, A: Tensor, G: Tensor) -> bool:
    """Whether the factors are those of a layer with this weight, with or without a bias."""
    matrices = [weight, weight.mT] if weight.dim() == 2 else [weight]  # [in, out] as well
    return weight.dim() >= 2 and any(
        A.shape[-1] - _fan_in(matrix) in (0, 1) and A.shape[0] * G.shape[-1] == matrix.shape[0]
        for matrix in matrices
    )


def root_keys(damping_split: str) -> tuple[str, ...]:
    """Keys of what the damped inverse of a layer is kept as."""
    return _EIGEN if damping_split == "exact" else _ROOTS


def saved_split(saved: dict[str, Any], damping_split: str) -> str:
    """The damping_split, or another that keeps the same, which has made the inverses in ``saved``.

    The option may have changed since; the next step sees to that.
    """
    kinds = ("exact", "pi")
    return next((s for s in kinds if root_keys(s)[0] in saved), damping_split)


def fresh_factors(
    matrix: Tensor, A_shape: torch.Size, G_shape: torch.Size, damping_split: str
) -> State:
    """State of a layer that has seen nothing; ``matrix`` is its weight as [out, ...]."""
    A, G, *roots, factor_updates, root_failures = torch.ops.torchium.kfac_init_state(
        matrix,
        has_bias=A_shape[-1] != _fan_in(matrix),
        groups=A_shape[0],
        damping_split=damping_split,
        diagonal_A=len(A_shape) == 2,
        diagonal_G=len(G_shape) == 2,
    )
    state = {"A": A, "G": G, "factor_updates": factor_updates, "root_failures": root_failures}
    return state | dict(zip(root_keys(damping_split), roots, strict=False))


def saved_factors(weight: Tensor, saved: dict[str, Any], damping_split: str) -> State:
    """State of the layer that ``saved`` may be of: its module is not known yet.

    The shapes of the factors, or of their roots, give the number of groups, whether there is a row for
    a bias, which are diagonals, and which dimension of a weight is the input.
    """
    A, G = (_saved_shape(saved, factor) for factor in FACTORS)
    matrix, groups = weight, 1
    if weight.dim() == 2 and G[-1:] == weight.shape[1:] != weight.shape[:1]:
        matrix = weight.detach().mT
    if A[:1] and A[0] > 0 and matrix.shape[0] % A[0] == 0:
        groups = A[0]
    has_bias = A[-1:] == (_fan_in(matrix) + 1,)
    return fresh_factors(
        matrix,
        _factor_shape(groups, _fan_in(matrix) + has_bias, len(A) == 2),
        _factor_shape(groups, matrix.shape[0] // groups, len(G) == 2),
        damping_split,
    )


def _saved_shape(saved: dict[str, Any], factor: str) -> tuple[int, ...]:
    keys = (factor, f"{factor}_inverse", f"{factor}_eigenvectors")
    found = next((saved[key] for key in keys if key in saved), None)
    return tuple(found.shape) if isinstance(found, Tensor) and found.dim() in (2, 3) else ()
