"""Natural gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from .._capture.capture import CallCapture, check_inputs
from .._capture.layers import (
    SAMPLE_KINDS,
    LayerCall,
    LayerKind,
    call_row,
    computed_weight,
    core_tensors,
    why_unsupported,
)
from .._per_sample.per_sample import per_sample_gradients
from .._per_sample.sample_loss import LossFunction
from ._core.capturing import CapturingOptimizer, ParamsOrModel
from ._core.options import OptionList
from ._core.plan import JointPlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_KINDS = SAMPLE_KINDS | {LayerKind.SELF_ATTENTION}

_REPORTED = ("solver", "samples", "rows", "iterations", "relative_residual", "graph_bytes")


class NaturalGradientReport(dict[str, Any]):
    """The dict that :meth:`NaturalGradient.report` describes; ``print`` shows a table."""

    def __str__(self) -> str:
        values = [self[key] for key in _REPORTED] if self else ["", 0, 0, 0, 0.0, 0]
        table: str = torch.ops.torchium.natural_gradient_report_table(*values)
        return table


class NaturalGradient(CapturingOptimizer):
    r"""Follows the natural gradient of the batch: the gradient times a damped inverse Fisher matrix.

    With :math:`J` the gradients of the losses of the :math:`n` samples, one per row,
    :math:`F = J^\top J / n` is the empirical Fisher matrix of all parameters together. With
    ``fisher="ggn"`` or ``"mc"``, :math:`F` is the generalized Gauss-Newton matrix or an estimate of it
    (:meth:`update_curvature`), and :meth:`update_jacobian` takes a :math:`J` from the caller. With
    :math:`v` the gradient in ``.grad``:

    .. math::
        d \leftarrow \mu\,d + (F + \text{damping}\,I)^{-1} (v - F \mu\,d), \qquad
        \theta \leftarrow \theta - \text{lr}\,d \min(1, \text{max\_norm} / \|d\|),

    where :math:`\mu` is ``momentum`` and the :math:`d` on the right that of the last step (SPRING). It
    is solved in the space of the rows of :math:`J`, by a float64 Cholesky factorisation of the n by n
    matrix :math:`J J^\top`, which is built layer by layer and never from :math:`J`; in that of the
    parameters, by one of the P by P matrix :math:`F`; or by conjugate gradients, which form neither.
    :math:`v` may be clipped or have weight decay added to it.

    The loss is a mean over the samples, which are dimension 0 of what every layer receives: Linear and
    the ``Conv1D`` of transformers (any leading dimensions), convolutions and transposed convolutions of
    1 to 3 dimensions, Embedding, LayerNorm and RMSNorm (those of other libraries too, known by what they
    compute), GroupNorm and the projections of ``nn.MultiheadAttention`` of equal queries, keys and values,
    also if a weight is shared or a layer is used several times. Positions that are
    looked up must be expanded to ``[batch, ...]``. All layers must see the samples in the same order: one
    that sorts or shuffles them, or receives time first or looks up pairs of positions ``[T, T]`` (the
    relative positions of T5) where there are as many positions as samples, gives a wrong Fisher matrix
    without an error, and so do statistics of the batch that are computed by hand (``x - x.mean(0)``).
    Micro-batches with loss / k, one ``backward()`` each, equal one batch. Calls of a layer in one backward
    pass are positions of the same samples, and no parts of a batch. Backward passes that reach the same
    call, as with ``retain_graph=True`` for several losses or with ``backward(inputs=...)``, are parts of
    the gradients of the same samples. Passes without ``backward()`` between two steps leave no trace.
    ``zero_grad()`` of the optimizer forgets what was captured, and so does every step, except one that
    raises for a wrong option.

    With ``update_freq`` k only each k-th step captures its batch. In between, that batch, which is
    then part of the state, preconditions the gradients.

    A gradient that is not finite, or too large to square (as for :class:`Shampoo`), skips the whole
    step; three in a row raise ``RuntimeError``.

    Sources: Amari, "Natural Gradient Works Efficiently in Learning", Neural Computation 10, 1998; in
    the space of samples: Ren, Goldfarb, 2019, `arXiv:1906.02353
    <https://arxiv.org/abs/1906.02353>`_; momentum: Goldshlager, Abrahamsen, Lin, "A Kaczmarz-inspired
    approach to accelerate the optimization of neural network wavefunctions" (SPRING), 2024,
    `arXiv:2401.10190 <https://arxiv.org/abs/2401.10190>`_; the Gauss-Newton matrix: Schraudolph, Neural
    Computation 14, 2002; the preconditioner: Frangella, Tropp, Udell, "Randomized Nystrom
    Preconditioning", 2021, `arXiv:2110.02820 <https://arxiv.org/abs/2110.02820>`_.

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
        max_norm (float, optional): bound of the norm of the direction, above 0. With :math:`C / \text{lr}`
            the step is at most :math:`C` long: :math:`\text{lr} \leftarrow \min(\text{lr}, C / \|d\|)`
            (default: None).
        solver (str): ``"gram"``, the factorisation in the space of the rows; ``"explicit"``, that in the
            space of the :math:`P` parameters; ``"cg"``, conjugate gradients; ``"auto"``: with :math:`m` the
            smaller of the rows and :math:`P`, the factorisation of order :math:`m` if
            :math:`16 m^2 \le` ``max_workspace_bytes`` (4096 by default), else ``"cg"``
            (default: "auto").
        fisher (str): where the rows of :math:`J` come from. ``"empirical"``: the gradients of the losses.
            ``"ggn"``: a square root of the Hessian of the loss with respect to the model's outputs (the
            generalized Gauss-Newton matrix). ``"mc"``: targets drawn from the model's own distribution (the Fisher
            matrix). The last two need :meth:`update_curvature` in each iteration. A new value counts from
            the next matrix on (default: "empirical").
        nystrom_rank (int): rank of the Nystrom preconditioner of conjugate gradients; 0: only the damping.
            It costs as many products with :math:`F` as its rank at each new matrix (default: 0).
        max_workspace_bytes (int): bound of the matrix of ``"auto"`` with its factor, and of the rows that
            ``"explicit"`` forms at a time, of at least one sample. With a ``process_group`` also of the layer
            calls that reach a rank at a time under ``"gram"``, of which two sets are in memory
            (default: 2**28).
        adaptive_damping (bool): :meth:`update_damping` may be called. Needs ``momentum=0``
            (default: False).
        grad_scaler (GradScaler, optional): scales the loss, under mixed precision; its scale is taken
            out of the samples' gradients. Needed only if its ``unscale_()`` is called before
            ``step()`` and ``fisher="empirical"``. It may be set later as an attribute; a copy of the optimizer has none
            (default: None).
        maximize (bool): go up instead of down (default: False).
        graphs (str or bool): steps on a GPU are captured in CUDA graphs after some steps, and
            replayed: the same results, bit for bit, with far less work for the host. ``"auto"``:
            where the memory that the graphs keep, with a copy of what was captured in the layers, is
            at most 5 % of the state or 1 % of the device's; ``"always"`` or True; ``"never"`` or
            False. After a change of an option other than ``lr``, or of the shapes of a batch, the
            first steps are launched. With a ``process_group`` only ``"always"`` captures, where its backend is
            NCCL; delete the optimizer before ``destroy_process_group()``, which waits until no graph
            with a collective is left (default: "auto").
        capturable (bool): a CUDA graph of the caller may capture :meth:`step` together with the forward and
            backward pass. A step before the capture creates the state. A tensor on the device as ``lr`` may
            change between replays; conjugate gradients keep the number of iterations of the capture.
            Needs ``update_freq=1`` and ``nystrom_rank=0``; not with a ``process_group`` or ``adaptive_damping``
            (default: False).
        process_group (ProcessGroup, optional): the ranks that share the step, as under
            ``DistributedDataParallel``: parameters and gradients are the same on all of them, and each has samples of
            its own. The matrix is that of all samples. All ranks must call :meth:`step`,
            :meth:`update_curvature`, :meth:`update_jacobian` and :meth:`update_damping` together (default:
            None, this process alone).

    Raises:
        ValueError: an option is out of its range or, where it must not, differs between groups; a
            parameter is sparse, complex, integer, expanded, a ``DTensor`` or a flat shard of
            ``FullyShardedDataParallel``; a layer of the model is not
            supported. :meth:`step` raises it, and changes nothing, for a batch that cannot be taken
            apart: BatchNorm in training, a layer that is not supported, a weight that is also used
            outside of its layer, layers that disagree on the number of samples.

    .. note::
        On a GPU conjugate gradients do not wait for the residual. A step launches a quarter and 8
        iterations more than the last known step needed, twice as many as before if that one did not
        reach ``eps``, and at first 4 times the order of the system, at most 1000. Iterations after the
        tolerance is reached change nothing. :meth:`report` has the residual.

        With ``update_freq`` above 1, ``flatten_optimizer_state_dict=True`` of
        ``torch.distributed.checkpoint`` drops the batch, without an error: the next step captures its own.

        The hooks work under ``torch.compile``, with a break of the graph at each layer. With several
        processes of ``torch.distributed`` and no ``process_group`` :meth:`step` raises ``RuntimeError``.

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
        fisher: str = "empirical",
        nystrom_rank: int = 0,
        max_workspace_bytes: int = 2**28,
        adaptive_damping: bool = False,
        grad_scaler: GradScaler | None = None,
        maximize: bool = False,
        graphs: str | bool = "auto",
        capturable: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        options = self._OPTIONS.given(locals())
        super().__init__(params_or_model, options, grad_scaler, process_group)
        self._check_known_layers()

    @staticmethod
    def compute_per_sample_gradients(
        model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any
    ) -> dict[str, Tensor]:
        """The gradient of the loss of every sample: :func:`torchium.per_sample_gradients`."""
        return per_sample_gradients(model, loss_fn, inputs, targets)

    def update_curvature(
        self,
        outputs: Tensor,
        loss: str,
        *,
        reduction: str = "mean",
        class_dim: int | None = None,
        mask: Tensor | None = None,
        samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        r"""Takes the matrix of the next step from the curvature of the loss (``fisher="mc"`` and ``"ggn"``).

        With :math:`H_i` the Hessian of the loss of sample :math:`i` with respect to its outputs and :math:`J_i`
        the Jacobian of these outputs with respect to the parameters,

        .. math::
            F = \frac1N \sum_i J_i^\top H_i J_i = \frac1N S^\top S,

        where :math:`S` has the rows :math:`v^\top J_i`, one for each column :math:`v` of a square root of
        :math:`H_i`: :math:`N C` rows for outputs :math:`[N, C]` and ``fisher="ggn"``, :math:`N` times
        ``samples`` for ``"mc"``. The :math:`N` samples are those of all calls since the last step or
        ``zero_grad()``. Calls for several outputs of one forward pass, as of heads, have the same ones:
        :math:`F` is that of the sum of their losses, :math:`\sum_h J_{hi}^\top H_{hi} J_{hi}` for sample
        :math:`i`, each with the weight 1, whatever its factor is in ``backward()``. For a weight :math:`w_h`
        pass ``outputs.detach().lerp(outputs, w_h ** 0.5)``. Every head of the loss needs a call. The losses, the
        arguments, when to call it and what it raises are those of :meth:`KFAC.update_curvature`; a step that
        keeps its matrix (``update_freq``) needs no call, which then does nothing.

        Example:
            >>> model = torch.nn.Linear(10, 2)
            >>> optimizer = torchium.NaturalGradient(model, lr=1.0, damping=1e-3, fisher="ggn")
            >>> outputs, targets = model(torch.randn(8, 10)), torch.randint(2, (8,))
            >>> optimizer.update_curvature(outputs, "cross_entropy")
            >>> torch.nn.functional.cross_entropy(outputs, targets).backward()
            >>> optimizer.step()
        """
        self._update_curvature(outputs, loss, reduction, class_dim, mask, samples, generator)

    def update_jacobian(self, rows: Sequence[Tensor], residuals: Tensor) -> None:
        r"""Takes the next step from residuals and their Jacobian, which the caller has computed.

        For losses whose rows no layer call gives, such as the residuals of a differential equation, which
        contain derivatives with respect to the inputs of the model. The step minimizes
        :math:`r^\top r / (2 n)` for residuals :math:`r`: the gradient is :math:`v = J^\top r / n`, and
        :math:`F = J^\top J / n`. A sum of losses with weights :math:`w` has rows and residuals times
        :math:`\sqrt w`. Sets ``.grad`` of every parameter to its part of :math:`v`, which may then be
        changed, and replaces what was captured. ``fisher`` does not matter, and neither do the
        kinds of layers, if the optimizer was given parameters and no model.

        With a ``process_group`` all ranks must call it. Each gives its own rows and residuals, :math:`n` counts
        those of all ranks, and all ranks get the same gradients.

        Args:
            rows (sequence of Tensor): :math:`J`, one tensor :math:`[n, *shape]` per parameter in the order of
                ``param_groups``, of its dtype and on its device, as from ``torch.func``. Not copied: it must
                not change until ``step()``.
            residuals (Tensor): :math:`[n]`.

        Raises:
            ValueError: tensors that do not fit, or ``update_freq`` above 1; nothing has changed.

        Example:
            >>> model, x = torch.nn.Linear(3, 1), torch.randn(8, 3)
            >>> optimizer = torchium.NaturalGradient(model, lr=1.0, damping=1e-6, momentum=0)
            >>> def residual(params, x):
            ...     return torch.func.functional_call(model, params, x).square().sum() - 1
            >>> params = {name: p.detach() for name, p in model.named_parameters()}
            >>> per_sample = torch.func.vmap(torch.func.grad_and_value(residual), (None, 0))
            >>> rows, residuals = per_sample(params, x)
            >>> optimizer.update_jacobian(list(rows.values()), residuals)
            >>> optimizer.step()
        """
        try:
            if isinstance(rows, Mapping):
                raise ValueError(
                    f"rows is a {type(rows).__name__}; pass its values in the order of param_groups: "
                    "list(rows.values()) if its keys are those of named_parameters()"
                )
            rows = list(rows)
            for name, value in (
                ("residuals", residuals),
                *((f"rows[{i}]", r) for i, r in enumerate(rows)),
            ):
                if not isinstance(value, Tensor):
                    raise ValueError(f"{name} must be a Tensor, got {type(value).__name__}")
            plan = self._bound_plan()
            self._adopt_options(plan)
        except BaseException:
            self._withdraw()
            raise
        plan.core.set_jacobian([row.detach() for row in rows], residuals.detach())

    def update_damping(self, loss_before: float | Tensor, loss_after: float | Tensor) -> float:
        r"""Adapts the damping of all groups by the rule of Levenberg and Marquardt.

        As :meth:`KFAC.update_damping`, with the reduction
        :math:`m = (\text{lr}\,\nu - \text{lr}^2 \nu^2 / 2)\, v \cdot d` in the quadratic model with the
        matrix :math:`F + \text{damping}\,I`, where :math:`\nu` is the factor of ``max_norm``. Needs
        ``adaptive_damping=True``. With ``update_freq`` above 1 the model of a step between two matrices is
        that of the older batch. With a ``process_group`` all ranks must call it; the losses are the means of
        those that the ranks give.

        Example:
            >>> model, x = torch.nn.Linear(10, 2), torch.randn(8, 10)
            >>> optimizer = torchium.NaturalGradient(model, momentum=0, adaptive_damping=True)
            >>> loss = model(x).square().mean()
            >>> loss.backward()
            >>> optimizer.step()
            >>> ratio = optimizer.update_damping(loss, model(x).square().mean())
        """
        return self._update_damping(loss_before, loss_after)

    def report(self) -> NaturalGradientReport:
        """How the last step was solved; waits for the device.

        Returns:
            A dict, which ``print`` shows as a table. ``"solver"``: ``"gram"``, ``"explicit"`` or ``"cg"``; ``"samples"``: how many the Fisher matrix
            has; ``"rows"`` of :math:`J`: one per sample, or one per sample and column of its curvature;
            ``"iterations"`` and ``"relative_residual"`` of conjugate gradients, else 0;
            ``"graph_bytes"``: the memory that captured steps keep. With a ``process_group`` samples and rows
            are those of all ranks. Empty before the first step.
        """
        if self._plan is None:
            return NaturalGradientReport()
        core = self._plan.core
        values = (*core.report(), core.graph_bytes())
        entries = zip(_REPORTED, values, strict=True) if values[0] else ()
        return NaturalGradientReport(entries)

    # ---- capture

    def _init_capture(self) -> None:
        self._capture = CallCapture(_KINDS, self._wants)
        self._refreshes = True  # the next step, once that is decided

    def _record_curvature(self, outputs: Tensor, *loss: Any) -> None:
        self._bound_plan().core.record_curvature(outputs, *loss, self._capture.core)

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
            reason = computed or why_unsupported(module, _KINDS)
            if reason is not None:
                own = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
                listed = ", ".join(own[:4]) + (f", {len(own) - 4} more" if len(own) > 4 else "")
                raise ValueError(
                    f"NaturalGradient cannot see the samples of {self._module_name(module)}, which "
                    f"{reason}; freeze its parameters ({listed}) by requires_grad_(False) or give "
                    "them to another optimizer, such as torchium.ShampooW"
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
        if not plan.core.is_refresh() or plan.core.has_jacobian():
            return
        passes = self._capture.calls()
        if self.param_groups[0]["fisher"] == "empirical":
            check_inputs(passes, "step() has been called")
            self._record_calls(plan, passes)
        else:
            params = {p for calls in passes for call in calls for p in call.params.values()}
            plan.core.note_reached([plan.positions[p] for p in params if p in plan.positions])
        if plan.core.is_start():
            return
        self._check_owners([p for p in plan.params if p.grad is not None])
        self._check_mixing()
        used_outside = self._capture.used_outside
        plan.core.exclude([i for i, p in enumerate(plan.params) if p in used_outside])

    def _record_calls(self, plan: JointPlan, passes: list[list[LayerCall]]) -> None:
        for index, calls in enumerate(passes):
            for call in calls:
                positions = {name: plan.positions.get(p, -1) for name, p in call.params.items()}
                weight, bias = (positions.get(name, -1) for name in ("weight", "bias"))
                tensors = core_tensors(call.module, call.input, call.output_gradient)
                plan.core.record(*tensors, *call_row(call.module, weight, bias, index))
