"""Natural gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from .._capture.capture import CallCapture
from .._capture.layers import ALL_KINDS, call_row, computed_weight, core_tensors, why_unsupported
from .._per_sample.per_sample import per_sample_gradients
from .._per_sample.sample_loss import LossFunction
from ._core.capturing import CapturingOptimizer, ParamsOrModel
from ._core.options import OptionList
from ._core.plan import JointPlan


class NaturalGradient(CapturingOptimizer):
    r"""Follows the natural gradient of the batch: the gradient times a damped inverse Fisher matrix.

    With :math:`J` the gradients of the losses of the :math:`n` samples, one a row,
    :math:`F = J^\top J / n` is the empirical Fisher matrix of all parameters together, and
    :math:`v` the gradient in ``.grad``:

    .. math::
        d \leftarrow \mu\,d + (F + \text{damping}\,I)^{-1} (v - F \mu\,d), \qquad
        \theta \leftarrow \theta - \text{lr}\,d \min(1, \text{max\_norm} / \|d\|),

    where :math:`\mu` is ``momentum`` and the :math:`d` on the right that of the last step (SPRING). It
    is solved in the space of samples, by a float64 Cholesky factorisation of the n by n matrix
    :math:`J J^\top`, which is built layer by layer and never from :math:`J`; or by conjugate
    gradients. :math:`v` may be clipped or have weight decay added to it.

    The loss is a mean over the samples, which are dimension 0 of what every layer receives: Linear
    (any leading dimensions), Conv2d, Embedding, LayerNorm and GroupNorm, also if a weight is shared
    or a layer is used several times. Positions that are looked up must be expanded to
    ``[batch, ...]``. All layers must see the samples in the same order: one that sorts or shuffles
    them, or receives time first where there are as many positions as samples, gives a wrong Fisher
    matrix without an error, and so do statistics of the batch that are computed by hand
    (``x - x.mean(0)``). Micro-batches with loss / k, one ``backward()`` each, equal one batch. Passes
    without ``backward()`` between two steps leave no trace. ``zero_grad()`` of the optimizer forgets
    what was captured, and so does every step, except one that raises for a wrong option.

    With ``update_freq`` k only each k-th step captures its batch. In between, that batch, which is
    then part of the state, preconditions the gradients.

    A gradient that is not finite, or too large to square (as for :class:`Shampoo`), skips the whole
    step; three in a row raise ``RuntimeError``.

    Sources: Amari, "Natural Gradient Works Efficiently in Learning", Neural Computation 10, 1998; in
    the space of samples: Ren, Goldfarb, 2019, `arXiv:1906.02353
    <https://arxiv.org/abs/1906.02353>`_; momentum: Goldshlager, Abrahamsen, Lin, "A Kaczmarz-inspired
    approach to accelerate the optimization of neural network wavefunctions" (SPRING), 2024,
    `arXiv:2401.10190 <https://arxiv.org/abs/2401.10190>`_.

    Args:
        params_or_model (nn.Module or iterable): the model, or parameters, named parameters or dicts
            of parameter groups: then their layers are found when they run. Parameters are dense,
            real, float32, float64, bfloat16 or float16, all on one device. Groups may differ in
            ``lr``, ``damping``, ``momentum`` and ``maximize``.
        lr (float or Tensor): learning rate, at least 0. A tensor has one element (default: 0.1).
        damping (float): added to the Fisher matrix, above 0: in units of the squared gradient of a
            sample. Far below those, all samples count alike, those that are fitted too, and late steps
            overshoot (default: 1).
        update_freq (int): steps between two Fisher matrices (default: 1).
        eps (float): relative tolerance of conjugate gradients, above 0 (default: 1e-8; float32
            parameters end near 1e-6).
        momentum (float): momentum, in [0, 1) (default: 0.9).
        max_norm (float, optional): bound of the norm of the direction, above 0 (default: None).
        solver (str): ``"gram"``, the factorisation; ``"cg"``, conjugate gradients; ``"auto"``, the
            first for up to 4096 samples if these are no more than the parameters (default: "auto").
        grad_scaler (GradScaler, optional): scales the loss, under mixed precision; its scale is taken
            out of the samples' gradients. Needed only if its ``unscale_()`` is called before
            ``step()``. It may be set later as an attribute; a copy of the optimizer has none
            (default: None).
        maximize (bool): go up instead of down (default: False).

    Raises:
        ValueError: an option is out of its range or, where it must not, differs between groups; a
            parameter is sparse, complex, integer, expanded, a ``DTensor`` or a flat shard of
            ``FullyShardedDataParallel``; a layer of the model is not
            supported. :meth:`step` raises it, and changes nothing, for a batch that cannot be taken
            apart: BatchNorm in training, a layer that is not supported, a weight that is also used
            outside of its layer, layers that disagree on the number of samples.

    .. note::
        With ``update_freq`` above 1, ``flatten_optimizer_state_dict=True`` of
        ``torch.distributed.checkpoint`` drops the batch, without an error: the next step captures its own.

        The hooks work under ``torch.compile``, with a break of the graph at each layer. Under
        ``torch.distributed`` with more than one process :meth:`step` raises ``RuntimeError``.

    Example:
        >>> model = torch.nn.Linear(10, 2)
        >>> optimizer = torchium.NaturalGradient(model, lr=0.1)
        >>> loss = model(torch.randn(8, 10)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    _OPTIONS = OptionList("NaturalGradient")
    _OWN_OPTION = "solver"
    _capture: CallCapture
    _PLAN = "NaturalGradientPlan"

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        lr: float | Tensor = 0.1,
        damping: float = 1.0,
        update_freq: int = 1,
        eps: float = 1e-8,
        *,
        momentum: float = 0.9,
        max_norm: float | None = None,
        solver: str = "auto",
        grad_scaler: GradScaler | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(params_or_model, self._OPTIONS.given(locals()), grad_scaler)
        self._check_known_layers()

    @staticmethod
    def compute_per_sample_gradients(
        model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any
    ) -> dict[str, Tensor]:
        """The gradient of the loss of every sample: :func:`torchium.per_sample_gradients`."""
        return per_sample_gradients(model, loss_fn, inputs, targets)

    def report(self) -> dict[str, Any]:
        """How the last step was solved; waits for the device.

        Returns:
            ``"solver"``: ``"gram"`` or ``"cg"``; ``"samples"``: how many the Fisher matrix has;
            ``"iterations"`` and ``"relative_residual"`` of conjugate gradients, else 0. Empty before
            the first step.
        """
        if self._plan is None:
            return {}
        values = self._plan.core.report()
        keys = ("solver", "samples", "iterations", "relative_residual")
        return dict(zip(keys, values, strict=True)) if values[0] else {}

    # ---- capture

    def _init_capture(self) -> None:
        self._capture = CallCapture(ALL_KINDS, self._wants)
        self._refreshes = True  # the next step, once that is decided

    def _wants(self) -> bool:
        """Whether the next step takes its Fisher matrix from its own batch."""
        if not self._decided:
            plan = self._decide()
            self._refreshes = plan is not None and plan.core.is_refresh()
        return self._refreshes

    # ---- unsupported layers

    def _check_known_layers(self) -> None:
        """Refuses layers that are known not to be supported."""
        params = [p for group in self.param_groups for p in group["params"]]
        self._check_owners([p for p in params if p.requires_grad])

    def _check_owners(self, params: list[Tensor]) -> None:
        for module in {m: None for p in params for m in self._capture.owners.get(p, ())}:
            how = computed_weight(module)
            computed = None if how is None else f"has a weight computed by {how}"
            reason = computed or why_unsupported(module)
            if reason is not None:
                raise ValueError(
                    f"NaturalGradient cannot see the samples of {self._module_name(module)}, which "
                    f"{reason}; freeze its parameters (requires_grad_(False)) or give them to "
                    "another optimizer, as torchium.ShampooW"
                )

    def _check_mixing(self) -> None:
        mixing = self._capture.mixing()
        if isinstance(mixing, nn.Module):
            raise ValueError(
                f"{self._module_name(mixing)} normalised with the statistics of the batch, so that the "
                "samples have no gradients of their own; call .eval() on it (with running "
                "statistics) or use GroupNorm"
            )
        if mixing is not None:
            raise ValueError(
                f"{mixing}(training=True), called in the forward pass, normalised with the statistics "
                "of the batch, so that the samples have no gradients of their own; call it with "
                "training=False and running statistics, or use group_norm"
            )

    # ---- the step

    def _before_step(self, plan: JointPlan) -> None:
        if not plan.core.is_refresh():
            return
        self._capture.check_inputs("step() has been called")
        self._record_calls(plan)
        if plan.core.is_start():
            return
        self._check_owners([p for p in plan.params if p.grad is not None])
        self._check_mixing()
        used_outside = self._capture.used_outside
        plan.core.exclude([i for i, p in enumerate(plan.params) if p in used_outside])

    def _record_calls(self, plan: JointPlan) -> None:
        for index, calls in enumerate(self._capture.calls()):
            for call in calls:
                weight, bias = (
                    plan.positions.get(call.params[name], -1) if name in call.reached else -1
                    for name in ("weight", "bias")
                )
                tensors = core_tensors(call.module, call.input, call.output_gradient)
                plan.core.record(*tensors, *call_row(call.module, weight, bias, index))
