"""Natural gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from .._capture.capture import CallCapture
from .._capture.layers import ALL_KINDS, LayerCall, computed_weight, samples, why_unsupported
from .._per_sample.per_sample import LossFunction, per_sample_gradients
from ._core.batch import ON_CPU, Batch, fresh_batch, is_batch_key
from ._core.capturing import CapturingOptimizer, JointStep, ParamsOrModel, all_zero
from ._core.checkpoint import OptionalState, fill_state
from ._core.options import OptionList
from ._core.parameters import State, fresh_step, parameter_name


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
    what was captured, and so does every step.

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
    _ROOT = "the natural gradient by"
    _capture: CallCapture
    # Whether the next step is a refresh, the batch of the last one, and its factorisation with what it
    # depends on; None: to be found out.
    _refresh: bool | None
    _batch: Batch | None
    _factorization: tuple[tuple[Any, ...], Tensor] | None
    # Of the parameters, when that batch was kept.
    _kept_shapes: dict[Tensor, torch.Size]

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
        if self._result is None:
            return {}
        count, result = self._result
        iterations, residual, by_cg = result.tolist()
        return {
            "solver": "cg" if by_cg else "gram",
            "samples": count,
            "iterations": int(iterations),
            "relative_residual": residual,
        }

    # ---- capture

    def _init_capture(self) -> None:
        self._capture = CallCapture(ALL_KINDS, self._wants)
        self._result: tuple[int, Tensor] | None = None

    def _wants(self, params: dict[str, Tensor]) -> bool:
        self._poll()
        return self._is_refresh()

    def _is_refresh(self) -> bool:
        """Whether the next step takes its Fisher matrix from its own batch.

        The first forward pass decides, though a GPU may report later that a step was skipped.
        """
        if self._refresh is None:
            params = [p for p in self._all_params() if self._has_state(p)]
            steps = max(self._known_host_steps(params), default=0)
            is_due = steps % self.param_groups[0]["update_freq"] == 0
            self._refresh = is_due or self._stored_batch() is None
        return self._refresh

    def _any_state(self) -> bool:
        return any(self._has_state(p) for p in self._all_params())

    def _stored_batch(self) -> Batch | None:
        """The batch of the last refresh, if it was kept for later steps."""
        if self._batch is None:
            self._batch = Batch.from_state(self._all_params(), self.state)
        return self._batch

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # ---- what cannot be seen

    def _check_known_layers(self) -> None:
        """Refuses layers of which it is known at once that they are not supported."""
        self._check_owners([p for p in self._all_params() if p.requires_grad])

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

    def _check_capture(self, step: JointStep, passes: list[list[LayerCall]]) -> None:
        """Refuses gradients whose samples are not known, before anything is changed."""
        self._check_owners(step.params)
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
        if not passes:
            raise ValueError(
                "NaturalGradient has captured no backward pass since the last step or zero_grad(); "
                "make the optimizer before the forward pass, call loss.backward() once a batch, "
                "and let gradients come from layers that it knows"
            )
        self._capture.completeness.resolve()
        reached = {call.params[name] for calls in passes for call in calls for name in call.reached}
        for param in step.params:
            if param in self._capture.completeness.incomplete or param not in reached:
                raise ValueError(
                    f"the gradient of {self._full_name(param)} does not come from its layer alone, as "
                    "with F.linear(x, embedding.weight) or a gradient that was set by hand; use "
                    "the weight through a module (tie it: linear.weight = embedding.weight)"
                )
        for calls in passes:
            self._check_samples(calls)

    def _check_samples(self, calls: list[LayerCall]) -> None:
        """Refuses layers of one pass that disagree on what their samples are."""
        first = calls[0]
        count = samples(first.module, first.input)
        positions, tokens = None, None
        for call in calls:
            if samples(call.module, call.input) != count:
                raise ValueError(
                    f"{self._module_name(first.module)} has seen {count} samples in dimension 0 of its "
                    f"input, {self._module_name(call.module)} {samples(call.module, call.input)}; "
                    "dimension 0 must be the sample in all layers (expand positions to [batch, ...])"
                )
            if isinstance(call.module, nn.Embedding):
                if call.input.dim() == 1:
                    positions = call
                elif call.input.dim() > 1 and call.input.shape[1] == count:
                    tokens = call
        if positions is not None and tokens is not None:
            raise ValueError(
                f"{self._module_name(positions.module)} has looked up {count} indices, which may be "
                f"samples or positions: {self._module_name(tokens.module)} has seen "
                f"{list(tokens.input.shape)}; expand positions to that shape"
            )

    # ---- the step

    def _step_joint(self, step: JointStep) -> None:
        refresh = self._is_refresh()
        passes = self._capture.calls() if refresh else []
        if refresh and not passes and not self._any_state() and all_zero(step.grads):
            self._start(step)
            return
        if refresh:
            self._check_capture(step, passes)
        batch = None if refresh else self._stored_batch()
        if batch is None:
            batch = Batch.of(passes, step.params, self._loss_scale())
        self._add_common_state(step, [self._has_momentum(step)] * len(step.params))
        before = self._host_step(step.params[0])
        self._run_step(step, batch, refresh, self._found_inf(step))
        self._count_step(step)
        self._refresh = None
        if refresh and not self._is_skipped(step.params[0], before):
            self._keep(batch)

    def _start(self, step: JointStep) -> None:
        """Makes the state by a step of zero gradients, which needs no samples.

        torch.distributed.checkpoint takes such a step to have state to load into.
        """
        self._add_common_state(step, [self._has_momentum(step)] * len(step.params))
        for param in step.params:
            self.state[param]["step"] += 1
            self._host_steps[param] += 1
        self._refresh = None

    @staticmethod
    def _has_momentum(step: JointStep) -> bool:
        return any(step.per_param("momentum"))

    def _is_skipped(self, param: Tensor, before: int) -> bool:
        """Whether the step was skipped, as far as the host knows now: on the CPU."""
        return param.is_cpu and int(self.state[param]["step"].item()) == before

    def _run_step(
        self, step: JointStep, batch: Batch, refresh: bool, found_inf: Tensor | None
    ) -> None:
        solver, dampings = step.groups[0]["solver"], step.per_param("damping")
        # What a factorisation depends on: that of an earlier step is used again.
        key = (batch, solver, dampings, [(id(p), p.dtype, p.device) for p in step.params])
        known = self._factorization
        factorization = known[1] if known is not None and known[0] == key else None
        states = [self.state[p] for p in step.params]
        options = step.groups[0]
        result, made = torch.ops.torchium.natural_gradient_step_(
            step.params,
            step.grads,
            [state["step"] for state in states],
            [state["momentum_buffer"] for state in states] if self._has_momentum(step) else [],
            self._status(step),
            *batch.arguments(step.params),
            factorization,
            lrs=step.lrs(),
            dampings=dampings,
            momentums=step.per_param("momentum"),
            maximize=step.per_param("maximize"),
            eps=options["eps"],
            max_norm=options["max_norm"],
            solver=solver,
            refreshed=refresh,
            found_inf=found_inf,
            scale=float(batch.samples),
            loss_scale=batch.loss_scale,
        )
        self._factorization = key, made if factorization is None else factorization
        self._result = batch.samples, result

    def _keep(self, batch: Batch) -> None:
        """Keeps the batch in the state if later steps need it; they must not see it change."""
        for param in self._all_params():
            state = self.state.get(param, {})
            for key in [key for key in state if is_batch_key(key)]:
                del state[key]
        factorization, self._factorization, self._batch = self._factorization, None, None
        if self.param_groups[0]["update_freq"] == 1:
            return
        for param, state in batch.state(self._all_params()).items():
            self.state[param].update(state)
        self._kept_shapes = {param: param.shape for param in self._all_params()}
        kept = self._stored_batch()
        if kept is not None and factorization is not None:
            self._factorization = (kept, *factorization[0][1:]), factorization[1]

    def _own_state(self, param: Tensor) -> State:
        batch = {k: v for k, v in self.state[param].items() if is_batch_key(k)}
        return super()._own_state(param) | {k: v for k, v in batch.items() if k not in ON_CPU}

    def _check_old_state(self, step: JointStep) -> None:
        super()._check_old_state(step)
        for param in step.params:
            shape = self._kept_shapes.get(param, param.shape)
            if shape != param.shape and not self._is_refresh():
                raise ValueError(self._misfit(param, f"batch (for shape {list(shape)})"))

    def _convert_state(self, step: JointStep) -> bool:
        moved = super()._convert_state(step)
        if moved:
            self._batch = self._factorization = None
        return moved

    # ---- state

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._refresh = None
        self._batch = None
        self._factorization = None
        self._kept_shapes = {}

    def _loaded_state(
        self, index: int, group: dict[str, Any], saved: dict[Tensor, dict[str, Any]]
    ) -> dict[Tensor, State]:
        def name(param: Tensor) -> str:
            return parameter_name(index, group, param)

        fresh: dict[Tensor, State] = {}
        for param, values in saved.items():
            fresh[param] = {"step": fresh_step(param)}
            if any(map(is_batch_key, values)):
                fresh[param] |= fresh_batch(param, values, len(self._all_params()), name(param))
        fill_state(fresh, saved, OptionalState(("momentum_buffer",)), name)
        return fresh
