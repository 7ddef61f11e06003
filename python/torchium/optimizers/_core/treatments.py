"""What K-FAC does with each parameter, in its report and its warnings."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..._callers import users_stacklevel
from .capturing import CapturingOptimizer
from .factors import FactorCapture, reason_of
from .plan import JointPlan


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
        plan, names = self._plan, self._short_names()
        fallback = set() if plan is None else {plan.params[i] for i in plan.core.fallback()}
        params = [p for p in names if self._has_state(p)]

        def with_diagonal(*keys: str) -> list[str]:
            factors = {
                p: self.state[p][key] for p in params for key in keys if key in self.state[p]
            }
            return [names[p] for p, factor in factors.items() if factor.dim() == 2]

        return KFACReport(
            parameters=self._treatments(fallback),
            preconditioned=[names[p] for p in params if p not in fallback],
            fallback=[names[p] for p in params if p in fallback],
            diagonal_A=with_diagonal("A", "K"),
            diagonal_G=with_diagonal("G", "C"),
            graph_bytes=0 if plan is None else plan.core.graph_bytes(),
        )

    def _treatments(self, fallback: set[Tensor]) -> dict[str, tuple[str, str]]:
        plan, names = self._plan, self._short_names()
        params, treated = ([], []) if plan is None else (plan.params, plan.core.treatments())
        treatments = dict(zip(params, treated, strict=True))
        done = {}
        for param, name in names.items():
            treatment, detail, weight = treatments.get(param, ("none", "", -1))
            if treatment == "none":
                has_state = self._has_state(param)
                since = " since its state was loaded or copied" if has_state else ""
                detail = f"has taken no step{since}"
            elif treatment == "fallback":
                detail = self._why_not(param, fallback)
            elif weight >= 0:
                detail += f" of {names[params[weight]]}"
            done[name] = (treatment, detail)
        return done

    def _why_not(self, param: Tensor, fallback: set[Tensor]) -> str:
        """Why no factors precondition a parameter; `fallback`: all of that kind."""
        weight = self._capture.weight_beside(param)
        reason = self._capture.problem(param)
        if reason is None and weight is not None and self._plan is not None:
            reason = self._plan.core.problem(self._plan.positions[weight]) or None
        if reason is not None:
            return reason
        return reason_of("not_captured" if weight in fallback else "other_bias")

    def _announce(self, plan: JointPlan) -> None:
        core = plan.core
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
