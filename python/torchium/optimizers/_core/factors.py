"""Hands layer calls to the plan of K-FAC."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..._capture.capture import Capture
from ..._capture.layers import (
    FACTOR_KINDS,
    NORM_KINDS,
    LayerKind,
    computed_weight,
    has_known_class,
    has_transposed_weight,
    is_compiled_by_jit,
    is_transposed_convolution,
    layer_kind,
    layer_params,
    may_be_layer,
    why_unsupported,
)
from .plan import JointPlan

SkippedLayers: TypeAlias = tuple["str | type[nn.Module]", ...]


def checked_skip_layers(skip_layers: Iterable[str | type[nn.Module]]) -> SkippedLayers:
    """Regular expressions for names of layers and of their classes, and classes."""
    if isinstance(skip_layers, (str, type)) or not isinstance(skip_layers, Iterable):
        raise ValueError(f"skip_layers must be a list, got {skip_layers!r}; pass [{skip_layers!r}]")
    skipped = tuple(skip_layers)
    for each in skipped:
        if isinstance(each, type) and issubclass(each, nn.Module):
            continue
        try:
            re.compile(each).search("")  # a pattern of bytes finds nothing in a string
        except (TypeError, re.error) as error:
            raise ValueError(
                f"skip_layers has {each!r}, which is neither a regular expression nor a class of modules "
                f"({error}); pass patterns for names of layers and of their classes, or classes"
            ) from None
    return skipped


class FactorCapture(Capture):
    """The core hands each call of a weight to the plan as soon as its gradient is there.

    ``loss_scale`` is a method of the optimizer, which is not kept alive: the factor of the loss, or
    None.
    """

    plan: JointPlan | None = None
    # The weights (id()) whose factors the next step updates; the plan keeps them alive.
    due: frozenset[int] = frozenset()

    def __init__(
        self,
        wants: Callable[[], bool],
        loss_scale: Callable[[], Tensor | None],
        skipped: SkippedLayers = (),
    ) -> None:
        super().__init__(FACTOR_KINDS, wants)
        self._skipped = skipped
        self._has_compared_skips = not skipped
        self._loss_scale = weakref.WeakMethod(loss_scale)
        # Of the last declare(): the plan, and which parameters were trained or used outside. None:
        # something has changed since.
        self._declared: tuple[JointPlan, list[bool], set[Tensor]] | None = None
        self._problems: dict[Tensor, str | None] = {}  # of the modules as they are now

    def adopt(self, module: nn.Module, name: str) -> None:
        super().adopt(module, name)
        self._changed()

    def _changed(self) -> None:
        self._declared = None
        self._problems.clear()

    def follow(self, plan: JointPlan | None) -> None:
        """Hands further calls to a plan, or to none, with the parameters that are due."""
        if plan is not self.plan:
            self._changed()
            self.plan = plan
            if plan is None:
                self.core.release()
            else:
                plan.core.receive_from(self.core)
        self.due = frozenset(id(plan.params[i]) for i in plan.core.due()) if plan else frozenset()

    def declare(self, plan: JointPlan) -> None:
        """Declares the known layers to the plan, if they have changed."""
        now = plan, [param.requires_grad for param in plan.params], self.used_outside
        if (
            self._declared is not None
            and self._declared[0] is plan
            and self._declared[1:] == now[1:]
        ):
            return
        self._problems.clear()
        rows, excluded = [], []
        for i, weight in enumerate(plan.params):
            if self.weight_beside(weight) is not weight:
                owners = self.owners.get(weight, [])
                is_bias = any(layer_params(module)[1] is weight for module in owners)
                if weight.dim() > 1 and not is_bias:  # its layer may have had it until now
                    excluded.append(i)
                continue
            problem = self._problem_of_modules(weight)
            owner, has_factors = self.owners[weight][0], problem is None
            rows += [i, self._bias(plan, weight) if has_factors else -1]
            lookups = [isinstance(module, nn.Embedding) for module in self.owners[weight]]
            rows += [int(has_transposed_weight(owner)), int(any(lookups))]
            rows += [getattr(owner, "groups", 1), int(all(lookups))]
            rows += [int(not has_factors), int(layer_kind(owner) in NORM_KINDS)]
            rows += [int(is_transposed_convolution(owner))]
            if not has_factors or self._is_used_outside(weight, now[2]):
                excluded.append(i)
        plan.core.declare(rows)
        plan.core.exclude(excluded)
        self._declared = now

    def problem(self, param: Tensor) -> str | None:
        """Why no layer preconditions the parameter; None: one does."""
        reason = self._problem_of_modules(param)
        if reason is not None:
            return reason
        weight = self.weight_beside(param)
        assert weight is not None
        is_outside = self._is_used_outside(weight, self.used_outside)
        return reason_of("outside") if is_outside else None

    def _is_used_outside(self, weight: Tensor, outside: set[Tensor]) -> bool:
        """Whether the weight or the bias that shares its factors is among these."""
        return bool(outside) and not outside.isdisjoint({weight, self.joint_bias(weight)})

    def _problem_of_modules(self, param: Tensor) -> str | None:
        if param not in self._problems:
            self._problems[param] = self._find_problem(param)
        return self._problems[param]

    def _find_problem(self, param: Tensor) -> str | None:
        owners = self.owners.get(param)
        if not owners:
            return reason_of("not_run")
        if any(self._is_skipped(module) for module in owners):
            return reason_of("skipped")
        reason = _problem_of_layers(owners)
        if reason is not None:
            return reason
        weight = self.weight_beside(param)
        if weight is None or weight not in self._params or not weight.requires_grad:
            return reason_of("frozen")
        if weight is not param and _problem_of_layers(self.owners[weight]) is not None:
            return reason_of("of_weight")
        if len({layer_kind(module) in NORM_KINDS for module in self.owners[weight]}) > 1:
            return reason_of("norm")
        if len({has_transposed_weight(module) for module in self.owners[weight]}) > 1:
            return reason_of("both_ways")
        if len({is_transposed_convolution(module) for module in self.owners[weight]}) > 1:
            return reason_of("convolved")
        if len({getattr(module, "groups", 1) for module in self.owners[weight]}) > 1:
            return reason_of("groups")
        if param is not weight and is_transposed_convolution(owners[0]):
            return reason_of("lone_bias")
        bias = self.joint_bias(weight)
        if param is not weight and param is not bias:
            return reason_of("other_bias")
        return None

    def _is_skipped(self, module: nn.Module) -> bool:
        return any(self._matches(each, module) for each in self._skipped)

    def _matches(self, entry: str | type[nn.Module], module: nn.Module) -> bool:
        """Whether an entry of ``skip_layers`` is of this layer."""
        if isinstance(entry, type):
            return isinstance(module, entry)
        names = (self.modules.get(module, ""), type(module).__name__)
        return any(re.search(entry, name) for name in names)

    def unmatched_skips(self) -> tuple[list[str], list[str]] | None:
        """Entries of ``skip_layers`` without a layer, and all layers, once these are known; else None."""
        if self._has_compared_skips or not self._params <= self.owners.keys():
            return None
        self._has_compared_skips = True
        layers = dict.fromkeys(module for owners in self.owners.values() for module in owners)
        unmatched = [
            getattr(each, "__name__", repr(each))
            for each in self._skipped
            if not any(self._matches(each, module) for module in layers)
        ]
        described = [f"{self.modules.get(m, '')!r} ({type(m).__name__})" for m in layers]
        return (unmatched, described) if unmatched else None

    def weight_beside(self, param: Tensor) -> Tensor | None:
        """The weight of the parameter's layer, perhaps the parameter itself; None: there is none."""
        owners = self.owners.get(param)
        return layer_params(owners[0])[0] if owners else None

    def joint_bias(self, weight: Tensor) -> Tensor | None:
        """The bias that shares the weight's factors: all its layers have the same one."""
        layers = [module for module in self.owners[weight] if not isinstance(module, nn.Embedding)]
        has_row = layers and not is_transposed_convolution(layers[0])
        bias = layer_params(layers[0])[1] if has_row else None
        if bias is None or bias not in self._params or not bias.requires_grad:
            return None
        return bias if set(self.owners[bias]) == set(layers) else None

    def _bias(self, plan: JointPlan, weight: Tensor) -> int:
        bias = self.joint_bias(weight)
        return -1 if bias is None else plan.positions.get(bias, -1)

    def _may_be_recorded(self, module: nn.Module) -> bool:
        return may_be_layer(module)

    def _is_needed(self, module: nn.Module) -> bool:
        return id(layer_params(module)[0]) in self.due

    def started(self) -> None:
        with self._lock:
            loss_scale, plan = self._loss_scale(), self.plan
            if plan is not None:
                self.declare(plan)
                plan.core.set_loss_scale(None if loss_scale is None else loss_scale())

    def record_curvature(self, outputs: Tensor, *loss: Any) -> None:
        """Hands the calls that ``outputs`` depends on to the plan; ``loss``: arguments of the core."""
        plan = self.plan
        assert plan is not None
        with self._lock:
            self.declare(plan)
        # Without the lock: the hooks of this backward pass may run on other threads.
        plan.core.record_curvature(outputs, *loss, self.core)


def _problem_of_layers(modules: list[nn.Module]) -> str | None:
    """Why the weight of these layers has no factors; None: it has."""
    is_tied = not all(isinstance(module, nn.Embedding) for module in modules)
    for module in modules:
        how = computed_weight(module)
        if how is not None:
            return reason_of("computed", how)
        why = why_unsupported(module, FACTOR_KINDS)
        if why and why.startswith("has ") and layer_kind(module) is LayerKind.EMBEDDING:
            return reason_of("tied" if is_tied else "embedding", why)
        if why:
            return _problem_of_class(module)
    return None


def _problem_of_class(module: nn.Module) -> str:
    """Why an unsupported module has no factors."""
    name, origin = type(module).__name__, type(module).__module__
    if is_compiled_by_jit(module):
        return reason_of("jit", name)
    if isinstance(module, nn.MultiheadAttention) and not module._qkv_same_embed_dim:
        return reason_of("attention", name)
    if has_known_class(module):  # it replaces a supported one
        return reason_of("own_forward", f"{name} of {origin}")
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return reason_of("recurrent", name)
    return reason_of("layer" if origin.startswith("torch.nn.") else "bare", name)


def reason_of(kind: str, name: str = "") -> str:
    """The core's words for a parameter that falls back."""
    reason: str = torch.ops.torchium.fallback_reason(kind, name)
    return reason
