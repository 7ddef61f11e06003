"""Hands layer calls to the plan of K-FAC."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..._capture.capture import Capture
from ..._capture.layers import (
    MATRIX_KINDS,
    TIED_KINDS,
    LayerCall,
    LayerKind,
    call_row,
    computed_weight,
    core_tensors,
    has_known_class,
    has_transposed_weight,
    is_single,
    layer_kind,
    padded,
    why_unsupported,
)
from .plan import JointPlan


class FactorCapture(Capture):
    """Hands each call of a weight to the plan as soon as its gradient is there.

    ``loss_scale`` is a method of the optimizer, which is not kept alive: the factor of the loss, or
    None.
    """

    plan: JointPlan | None = None
    due: frozenset[Tensor] = frozenset()  # the weights whose factors the next step updates

    def __init__(
        self,
        wants: Callable[[], bool],
        loss_scale: Callable[[], Tensor | None],
    ) -> None:
        super().__init__(TIED_KINDS, wants)
        self._loss_scale = weakref.WeakMethod(loss_scale)
        # Of the last declare(): the plan, which parameters were trained or used outside, and of each
        # weight the reason for having no factors and its bias. None: something has changed since.
        self._declared: tuple[JointPlan, list[bool], set[Tensor]] | None = None
        self._declared_weights: dict[Tensor, tuple[str | None, int]] = {}
        self._problems: dict[Tensor, str | None] = {}  # of modules, in this backward pass

    def adopt(self, module: nn.Module, name: str) -> None:
        super().adopt(module, name)
        self._forget_problems()

    def _forget_problems(self) -> None:
        self._declared = None
        self._problems.clear()

    def release(self) -> None:
        """Releases the plan."""
        self.plan = None
        self._forget_problems()

    def declare(self, plan: JointPlan) -> None:
        """Tells the plan which layers are known, if that has changed."""
        now = plan, [param.requires_grad for param in plan.params], self.used_outside
        if (
            self._declared is not None
            and self._declared[0] is plan
            and self._declared[1:] == now[1:]
        ):
            return
        self._problems.clear()
        self._declared_weights.clear()
        rows, excluded = [], []
        for i, weight in enumerate(plan.params):
            if self.weight_beside(weight) is not weight:
                if weight.dim() > 1:  # its layer may have had it until now
                    excluded.append(i)
                continue
            problem, bias = self._weight(plan, weight)
            self._declared_weights[weight] = problem, bias
            if problem is None:
                owner = self.owners[weight][0]
                rows += [i, bias, int(has_transposed_weight(owner))]
                rows += [int(self._is_tied(weight)), getattr(owner, "groups", 1)]
            if problem is not None or self._is_used_outside(weight):
                excluded.append(i)
        plan.core.declare(rows)
        plan.core.exclude(excluded)
        self._declared = now

    def _weight(self, plan: JointPlan, weight: Tensor) -> tuple[str | None, int]:
        """Why the weight has no factors, and the position of the bias that shares them, else -1."""
        problem = self._problem_of_modules(weight)
        return problem, -1 if problem is not None else self._bias(plan, weight)

    def _declared_weight(self, plan: JointPlan, weight: Tensor) -> tuple[str | None, int]:
        """The same as the plan knows it, before a call is recorded: its factors have that shape."""
        layer = self._weight(plan, weight)
        if self._declared_weights.get(weight) != layer:
            self._declared = None
            self.declare(plan)
        return layer

    def problem(self, param: Tensor) -> str | None:
        """Why no layer preconditions the parameter; None: one does."""
        reason = self._problem_of_modules(param)
        if reason is not None:
            return reason
        weight = self.weight_beside(param)
        assert weight is not None
        return "used outside of its layer" if self._is_used_outside(weight) else None

    def _is_used_outside(self, weight: Tensor) -> bool:
        """Whether the weight or the bias that shares its factors is."""
        outside = self.used_outside
        return bool(outside) and not outside.isdisjoint({weight, self.joint_bias(weight)})

    def _problem_of_modules(self, param: Tensor) -> str | None:
        if param not in self._problems:
            self._problems[param] = self._find_problem(param)
        return self._problems[param]

    def _find_problem(self, param: Tensor) -> str | None:
        owners = self.owners.get(param)
        if not owners:
            return "in no module that has run"
        reason = _problem_of_layers(owners)
        if reason is not None:
            return reason
        weight = self.weight_beside(param)
        if weight is None or weight not in self._params or not weight.requires_grad:
            return "its weight is not trained"
        if weight is not param and _problem_of_layers(self.owners[weight]) is not None:
            return "its weight falls back"
        if len({has_transposed_weight(module) for module in self.owners[weight]}) > 1:
            return "used as [in, out] and as [out, in]"
        if len({getattr(module, "groups", 1) for module in self.owners[weight]}) > 1:
            return "used by convolutions of different groups"
        bias = self.joint_bias(weight)
        if param is not weight and param is not bias:
            return "not the one bias of its weight"
        return None

    def weight_beside(self, param: Tensor) -> Tensor | None:
        """The weight of the parameter's layer, perhaps the parameter itself; None: there is none."""
        owners = self.owners.get(param)
        return owners[0]._parameters.get("weight") if owners else None

    def joint_bias(self, weight: Tensor) -> Tensor | None:
        """The bias that shares the weight's factors: all its layers have the same one."""
        layers = [module for module in self.owners[weight] if not isinstance(module, nn.Embedding)]
        bias = layers[0]._parameters.get("bias") if layers else None
        if bias is None or bias not in self._params or not bias.requires_grad:
            return None
        return bias if set(self.owners[bias]) == set(layers) else None

    def _bias(self, plan: JointPlan, weight: Tensor) -> int:
        bias = self.joint_bias(weight)
        return -1 if bias is None else plan.positions.get(bias, -1)

    def _is_tied(self, weight: Tensor) -> bool:
        """Whether the weight is looked up as an embedding too."""
        return any(isinstance(module, nn.Embedding) for module in self.owners[weight])

    def _may_be_recorded(self, module: nn.Module) -> bool:
        return has_known_class(module)

    def _is_needed(self, params: dict[str, Tensor]) -> bool:
        weight = params.get("weight")
        return weight in self.due and self._may_be_in_products(weight)

    def _may_be_in_products(self, weight: Tensor) -> bool:
        """Whether a layer that is no embedding owns the weight, or one may still be found."""
        owners = self.owners.get(weight, ())
        return self.is_searching() or not all(isinstance(m, nn.Embedding) for m in owners)

    def _started(self, root: int) -> None:
        self._problems.clear()  # modules may have changed

    def _restart(self, param: Tensor, root: int) -> None:
        if self.plan is not None and param in self.plan.positions:
            self.plan.core.drop(self.plan.positions[param])

    def _reached(self, name: str, call: LayerCall) -> None:
        weight, plan = call.params.get("weight"), self.plan
        if name != "weight" or weight is None or plan is None or weight not in plan.positions:
            return
        problem, bias = self._declared_weight(plan, weight)
        if weight in self.used_outside or problem is not None:
            return
        loss_scale = self._loss_scale()
        row = call_row(call.module, plan.positions[weight], bias, call.root)[0]
        plan.core.record(
            *core_tensors(call.module, call.input, call.output_gradient),
            row,
            self._is_tied(weight),
            None if loss_scale is None else loss_scale(),
        )

    def record_curvature(self, outputs: Tensor, *loss: Any) -> None:
        """Hands the calls that ``outputs`` depends on to the plan; ``loss``: arguments of the core."""
        plan = self.plan
        assert plan is not None
        numbers, inputs, sizes, rows, tied = [], [], [], [], []
        with self._lock:
            self._problems.clear()  # modules may have changed
            for number in self._graph.calls_of(outputs):
                hook = self._output_hooks.get(number)
                weight = None if hook is None else hook.params.get("weight")
                if hook is None or weight is None or weight not in plan.positions:
                    continue
                problem, bias = self._declared_weight(plan, weight)
                if problem is not None:
                    continue
                module, shape = hook.module, list(hook.shape)
                input = padded(module, hook.input())
                single = is_single(module, input)
                numbers.append(number)
                inputs.append(input.unsqueeze(0) if single else input)
                sizes.append([1, *shape] if single else shape)
                rows.append(call_row(module, plan.positions[weight], bias, 0)[0])
                tied.append(int(self._is_tied(weight)))
        # Without the lock: the hooks of this backward pass may run on other threads.
        plan.core.record_curvature(outputs, *loss, self._graph, numbers, inputs, sizes, rows, tied)


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
