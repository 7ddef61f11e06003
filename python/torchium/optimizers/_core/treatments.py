"""What K-FAC does with each parameter, in its report and its warnings."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..._callers import users_stacklevel
from .capturing import CapturingOptimizer
from .factors import FactorCapture, reason_of
from .plan import JointPlan, state_of


class KFACReport(dict[str, Any]):
    """The dict that :meth:`KFAC.report` describes; ``print`` shows a table."""

    def __str__(self) -> str:
        parameters = self["parameters"]
        treatments, details = zip(*parameters.values(), strict=True) if parameters else ((), ())
        table: str = torch.ops.torchium.kfac_report_table(
            list(parameters), treatments, details, self["graph_bytes"]
        )
        return table


class TreatmentReports(CapturingOptimizer):
    """Knows which parameters have factors, and why others have none."""

    _capture: FactorCapture

    def _report(self) -> KFACReport:
        plan, names = self._own_plan(), self._short_names()
        fallback = {plan.params[i] for i in plan.core.fallback()}
        reasons = [self._why_not(p, fallback) if p in fallback else "" for p in names]
        states = [state_of(p, self.state) for p in names]
        treatments, *others = plan.core.report([*names], [*names.values()], states, reasons)
        keys = ("preconditioned", "fallback", "diagonal_A", "diagonal_G", "graph_bytes")
        return KFACReport(
            parameters=dict(zip(names.values(), treatments, strict=True)),
            **dict(zip(keys, others, strict=True)),
        )

    def _why_not(self, param: Tensor, fallback: set[Tensor]) -> str:
        """Why no factors precondition a parameter; `fallback`: all of that kind."""
        weight = self._capture.weight_beside(param)
        reason = self._capture.problem(param)
        if reason is None and weight is not None and self._plan is not None:
            reason = self._plan.core.problem(self._plan.positions[weight]) or None
        if reason is not None:
            return reason
        if weight not in fallback:
            return reason_of("other_bias")
        plan = self._plan
        needs_curvature = plan is not None and plan.core.needs_curvature(plan.positions[param])
        return reason_of("no_curvature" if needs_curvature else "not_captured")

    def _announce(self, plan: JointPlan) -> None:
        core = plan.core
        unmatched = self._capture.unmatched_skips()
        if unmatched is not None:
            text = torch.ops.torchium.unmatched_skips_warning(type(self).__name__, *unmatched)
            self._warn(text)
        if not core.has_warnings():
            return
        names = self._short_names()
        fallback = [plan.params[i] for i in core.new_fallback()]
        if fallback and (self._capture.ran or any(bool(p.grad.any()) for p in fallback)):
            kinds: dict[str, list[str]] = {}
            members = set(fallback)
            for param in fallback:
                kinds.setdefault(self._why_not(param, members), []).append(names[param])
            self._warn(core.fallback_warning(type(self).__name__, kinds))
        for text in core.new_warnings(type(self).__name__, [names[p] for p in plan.params]):
            self._warn(text)

    def _warn(self, text: str) -> None:
        warnings.warn(text, stacklevel=users_stacklevel())
