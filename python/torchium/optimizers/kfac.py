"""K-FAC."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ._core.capturing import CapturingOptimizer, JointStep, ParamsOrModel, all_zero
from ._core.checkpoint import OptionalState, fill_state
from ._core.factors import (
    COUNT_KEYS,
    FACTOR_KEYS,
    FACTORS,
    FactorCapture,
    FactorSums,
    factors_fit,
    fresh_factors,
    root_keys,
    saved_factors,
    saved_split,
)
from ._core.options import OptionList
from ._core.parameters import State, fresh_step, parameter_name
from ._core.summary import summary


@dataclass(frozen=True)
class _Layer:
    """A weight of a step that is preconditioned, and the bias that shares its factors."""

    weight: Tensor
    bias: Tensor | None
    sums: FactorSums | None  # None: the factors stay
    inverse_due: bool
    inverse_lost: bool  # there are factors, but another damping_split has made the inverse

    def row(self, index: dict[Tensor, int]) -> list[int]:
        """The layer as the operator takes it; ``index`` is the place of each parameter."""
        samples = 0 if self.sums is None else sum(self.sums.samples.values())
        rows = 0 if self.sums is None else self.sums.rows
        bias = -1 if self.bias is None else index[self.bias]
        when = [int(self.inverse_due), int(self.inverse_lost)]
        return [index[self.weight], bias, samples, rows, *when]


class KFAC(CapturingOptimizer):
    r"""Preconditions the gradient of each layer by the Kronecker factors of its Fisher matrix.

    For a layer with inputs :math:`a` (a 1 appended for the bias) and gradients :math:`g` of the loss
    of single samples by its outputs, :math:`A = E[a a^\top]` and :math:`G = E[g g^\top]`
    approximate the block of the empirical Fisher matrix by :math:`A \otimes G`. With :math:`V` the
    gradient of weight and bias in ``.grad``, in this order:

    1. :math:`V \leftarrow V + \text{weight\_decay}\,\theta`;
    2. the direction :math:`D = (G + \sqrt{\text{damping}}/\pi\,I)^{-1}\, V\,
       (A + \pi \sqrt{\text{damping}}\,I)^{-1}`, or with ``damping_split="exact"``
       :math:`(A \otimes G + \text{damping}\,I)^{-1} V`;
    3. the KL clip scales the directions of all layers together by
       :math:`\min(1, \sqrt{\text{kl\_clip} / |\sum \text{lr}^2\, V \cdot D|})`;
    4. momentum, and :math:`\theta \leftarrow \theta - \text{lr}\,D`.

    Factors are captured at the steps 1, 1 + ``TCov``, ... and averaged:
    :math:`A \leftarrow d_k A + (1 - d_k) A_\text{new}` with
    :math:`d_k = \min(1 - 1/k, \text{stat\_decay})` for the k-th update. Inverses are due at the
    steps 1, 1 + ``TInv``, .... Layers with several positions a sample (sequences, convolutions) sum
    over them: :math:`A = \sum a a^\top / (N T)`, :math:`G = \sum g g^\top / N`.

    Layers are ``nn.Linear`` (any leading dimensions; dimension 0 is the sample), the ``Conv1D`` of
    transformers, and ``nn.Conv2d``, also if a weight is shared or a layer is used several times. The
    weight of a linear layer may be that of an ``nn.Embedding`` too (a tied head). Other parameters,
    embeddings that are not tied, and weights that are also used outside of their layer take steps of
    SGD with momentum; a warning counts them once, and :meth:`report` names them. Uses outside are
    looked for where factors are captured, and what is found holds until the next time.
    Micro-batches with loss / k, one ``backward()`` each, equal one batch.
    Passes without ``backward()`` between two steps leave no trace. ``zero_grad()`` of the optimizer
    forgets what was captured, and so does every step.

    A gradient that is not finite, or too large to square (as for :class:`Shampoo`), skips the whole
    step, and so do inputs and output gradients of layers whose sums of squares overflow. A root that
    is not finite or not accurate is never used: the layer keeps its last good one, and three
    failures in a row raise ``RuntimeError``. State is float32 (float64 for float64 parameters).

    Sources: Martens, Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate
    Curvature", ICML 2015, `arXiv:1503.05671 <https://arxiv.org/abs/1503.05671>`_; convolutions:
    Grosse, Martens, ICML 2016, `arXiv:1602.01407 <https://arxiv.org/abs/1602.01407>`_; shared
    weights ("expand"): Eschenhagen et al., NeurIPS 2023,
    `arXiv:2311.00636 <https://arxiv.org/abs/2311.00636>`_; the KL clip: Ba, Grosse, Martens,
    "Distributed Second-Order Optimization using Kronecker-Factored Approximations", ICLR 2017.

    Args:
        params_or_model (nn.Module or iterable): the model, or parameters, named parameters or dicts
            of parameter groups: then their layers are found when they run. Parameters are dense,
            real, float32, float64, bfloat16 or float16, all on one device. Every option but
            ``batch_averaged``, ``kl_clip``, ``damping_split`` and ``root_method`` may be set for a
            group; the group of its weight decides for a layer.
        lr (float or Tensor): learning rate, at least 0. A tensor has one element (default: 0.003).
        momentum (float): momentum of the direction, in [0, 1) (default: 0.9).
        weight_decay (float): L2 penalty (default: 0).
        damping (float): added to the Fisher matrix, at least 0 (default: 0.01).
        TCov (int): steps between two updates of the factors (default: 5).
        TInv (int): steps between two inversions of the factors (default: 10).
        batch_averaged (bool): the loss is a mean over the samples, and no sum (default: True).
        eps (float): floor of the damping of a factor, and with ``damping_split="exact"`` of its
            eigenvalues (default: 1e-8).
        stat_decay (float): decay of the averages of the factors, in [0, 1] (default: 0.95).
        kl_clip (float, optional): bound of the step in the metric of the Fisher matrix, above 0.
            None: no bound (default: 1e-3).
        damping_split (str): ``"pi"``, with :math:`\pi^2` the ratio of the mean eigenvalues of A and G;
            ``"plain"``, with :math:`\pi = 1`; or ``"exact"`` (default: "pi").
        root_method (str): how inverses are computed. ``"eigh"``: by eigenvalues. ``"newton"``: by a coupled
            Newton iteration, which raises damping below :math:`2^{-20}` of the Frobenius norm of a factor
            to that (:math:`2^{-46}` in float64). ``"auto"``: by this iteration in float32 on a CUDA device
            with kernels for it, else by Cholesky factors, and on the CPU by eigenvalues where a pivot is
            lost in rounding. ``"exact"`` needs eigenvectors, and so ``"eigh"`` or ``"auto"``, which are the
            same there (default: "auto").
        max_factor_size (int): of a factor of a larger order only the diagonal is kept; a warning and
            :meth:`report` name those. G of a tied head is always a diagonal. A factor of order n
            takes :math:`8 n^2` bytes with its inverse, and an inversion of order :math:`n^3` operations.
            A new value counts for factors that do not exist yet (default: 5000).
        grad_scaler (GradScaler, optional): scales the loss, under mixed precision; its scale is taken
            out of the factors. Needed only if its ``unscale_()`` is called before ``step()``. It may be
            set later as an attribute; a copy of the optimizer has none (default: None).
        maximize (bool): go up instead of down (default: False).

    Raises:
        ValueError: an option is out of its range or, where it must not, differs between groups; a
            parameter is sparse, complex, integer, expanded, a ``DTensor`` or a flat shard of
            ``FullyShardedDataParallel``.

    .. note::
        ``flatten_optimizer_state_dict=True`` of ``torch.distributed.checkpoint`` drops the factors when
        it loads, without an error; load with the default, ``False``.

        The hooks work under ``torch.compile``, with a break of the graph at each layer. Under
        ``torch.distributed`` with more than one process :meth:`step` raises ``RuntimeError``.

    Example:
        >>> model = torch.nn.Linear(10, 2)
        >>> optimizer = torchium.KFAC(model, lr=0.1)
        >>> loss = model(torch.randn(8, 10)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    _ROOT_REMEDY = (
        "raise damping, set root_method to 'eigh', or clip gradients so large that factors overflow"
    )
    _OPTIONS = OptionList("KFAC")
    _OWN_OPTION = "TCov"
    _EXAMINED = "a gradient (or an input or output gradient of its layer)"
    _IN_STATE_DTYPE = frozenset({"momentum_buffer"}) | FACTOR_KEYS - {*COUNT_KEYS}
    _capture: FactorCapture

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        lr: float | Tensor = 0.003,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 0.01,
        TCov: int = 5,
        TInv: int = 10,
        batch_averaged: bool = True,
        eps: float = 1e-8,
        *,
        stat_decay: float = 0.95,
        kl_clip: float | None = 1e-3,
        damping_split: str = "pi",
        root_method: str = "auto",
        max_factor_size: int = 5000,
        grad_scaler: GradScaler | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(params_or_model, self._OPTIONS.given(locals()), grad_scaler)

    def report(self) -> dict[str, list[str]]:
        """Names of the parameters that are ``"preconditioned"`` and of those that ``"fallback"``.

        Both lists are those of the last step that a parameter took; one without a name is called by
        its place. A layer joins the first list with its first factors. ``"diagonal_A"`` and
        ``"diagonal_G"`` name the weights of which that factor is kept as its diagonal.
        """
        params = [p for group in self.param_groups for p in group["params"] if self._has_state(p)]
        done = {
            "preconditioned": [p for p in params if p not in self._fallback],
            "fallback": [p for p in params if p in self._fallback],
        }
        for factor in ("A", "G"):
            done[f"diagonal_{factor}"] = [
                p for p in params if factor in self.state[p] and self.state[p][factor].dim() == 2
            ]
        return {key: [self._short_name(p) for p in value] for key, value in done.items()}

    # ---- capture

    def _init_capture(self) -> None:
        self._capture = FactorCapture(self._wants, self._loss_scale)
        # Parameters that took their last step without factors, and why.
        self._fallback: dict[Tensor, str] = {}
        self._warned: set[Tensor] = set()

    def _wants(self, params: dict[str, Tensor]) -> bool:
        """Whether the factors of a layer are due."""
        self._poll()
        weight = params.get("weight")
        if weight is None or self._host_step(weight) % self._group_of(weight)["TCov"]:
            return False
        if not self._capture.may_be_in_products(weight):
            return False
        self._note_shapes(weight)
        return True

    def _note_shapes(self, param: Tensor) -> None:
        """Gives the capture the shapes of a weight's factors, and the limit of new ones."""
        self._capture.limits[param] = self._group_of(param)["max_factor_size"]
        state = self.state.get(param, {})
        if {*FACTORS} <= state.keys() and factors_fit(param, state["A"], state["G"]):
            self._capture.shapes[param] = state["A"].shape, state["G"].shape
        else:
            self._capture.shapes.pop(param, None)

    # ---- the step

    def _step_joint(self, step: JointStep) -> None:
        self._capture.completeness.resolve()
        for param in step.params:
            self._note_shapes(param)
        layers = self._layers(step)
        self._note_fallback(step, layers)
        self._add_common_state(step, [momentum > 0.0 for momentum in step.per_param("momentum")])
        self._add_factors(layers)
        self._run_step(step, layers, self._found_inf(step))
        self._has_factors.update((layer.weight, True) for layer in layers)
        self._count_step(step)

    def _layers(self, step: JointStep) -> list[_Layer]:
        """The layers that have factors, or get their first ones."""
        capture, active = self._capture, set(step.params)
        layers = []
        for param in step.params:
            if capture.weight_beside(param) is not param or capture.problem(param) is not None:
                continue
            sums, has_factors = capture.sums_of(param), self._knows_factors(param)
            if sums is None and not has_factors:
                continue
            bias = capture.joint_bias(param) if capture.has_room(param) else None
            group = self._group_of(param)
            due = not has_factors or self._host_step(param) % group["TInv"] == 0
            lost = has_factors and not self._has_roots(param, group["damping_split"])
            layers.append(_Layer(param, bias if bias in active else None, sums, due, lost))
        return layers

    def _knows_factors(self, weight: Tensor) -> bool:
        """Whether the layer has factors; read from the device where the host does not know."""
        if weight not in self._has_factors:
            # A wait, but only after a load, a copy or a skipped step.
            updates = self.state.get(weight, {}).get("factor_updates")
            self._has_factors[weight] = updates is not None and updates.item() > 0
        return self._has_factors[weight]

    def _note_fallback(self, step: JointStep, layers: list[_Layer]) -> None:
        """Keeps the parameters that no factors precondition for report(), and warns of new ones."""
        done = {p for layer in layers for p in (layer.weight, layer.bias)}
        for param in step.params:
            if param in done:
                self._fallback.pop(param, None)
            else:
                self._fallback[param] = self._capture.problem(param) or "not seen in use"
        new = [p for p in step.params if p in self._fallback and p not in self._warned]
        if not new or (not self._capture.ran and all_zero(step.grads)):
            return
        self._warned.update(new)
        names: dict[str, list[str]] = {}
        for param in new:
            names.setdefault(self._fallback[param], []).append(self._short_name(param))
        warnings.warn(
            f"KFAC preconditions {len(done - {None})} of {len(step.params)} parameters. It takes steps "
            f"of SGD with momentum for {summary(names)}. report() names all of them; a group with a larger "
            "lr or another optimizer may suit them better",
            stacklevel=2,
        )

    def _has_roots(self, weight: Tensor, damping_split: str) -> bool:
        """Whether a layer with factors has what this rule makes of them."""
        return all(key in self.state.get(weight, ()) for key in root_keys(damping_split))

    def _add_factors(self, layers: list[_Layer]) -> None:
        """Makes the factors and roots that layers lack, and warns of factors that are diagonals."""
        diagonal: dict[str, list[str]] = {}
        for weight in (layer.weight for layer in layers):
            state, split = self.state[weight], self._group_of(weight)["damping_split"]
            if "A" in state:
                if not self._has_roots(weight, split):  # damping_split has changed
                    self._reset_roots(weight, split)
                continue
            matrix, shapes = self._capture.matrix(weight), self._capture.new_shapes(weight)
            state.update(fresh_factors(matrix, *shapes, split))
            for factor, shape in zip(FACTORS, shapes, strict=True):
                if len(shape) == 2 and shape[-1] > self._capture.limits[weight]:
                    name = f"{self._short_name(weight)} ({shape[-1]})"
                    diagonal.setdefault(f"a factor {factor}", []).append(name)
        if diagonal:
            warnings.warn(
                f"KFAC keeps only the diagonal of factors above max_factor_size: {summary(diagonal)}",
                stacklevel=2,
            )

    def _reset_roots(self, weight: Tensor, damping_split: str) -> None:
        state = self.state[weight]
        fresh = saved_factors(weight, state, damping_split)
        for key in FACTOR_KEYS - {*FACTORS, "factor_updates"}:
            state.pop(key, None)
        state.update({k: v for k, v in fresh.items() if k not in state})

    def _own_state(self, param: Tensor) -> State:
        counts = {k: v for k, v in self.state[param].items() if k in COUNT_KEYS}
        return super()._own_state(param) | counts

    def _check_old_state(self, step: JointStep) -> None:
        super()._check_old_state(step)
        for param in step.params:
            state = self.state.get(param, {})
            if FACTOR_KEYS.isdisjoint(state):
                continue
            lost = [key for key in (*FACTORS, *COUNT_KEYS) if key not in state]
            if lost:
                raise ValueError(
                    f"the state of {self._full_name(param)} has lost {lost[0]!r}; delete all of it to "
                    "start afresh"
                )
            if not factors_fit(param, state["A"], state["G"]):
                shapes = f"factors A {list(state['A'].shape)} and G {list(state['G'].shape)}"
                raise ValueError(self._misfit(param, shapes))

    def _run_step(self, step: JointStep, layers: list[_Layer], found_inf: Tensor | None) -> None:
        states = [self.state[p] for p in step.params]
        of_layers = [self.state[layer.weight] for layer in layers]
        groups = [self._group_of(layer.weight) for layer in layers]
        options = step.groups[0]
        nothing = torch.empty(0, device=step.device)
        scale = self._loss_scale() if self.grad_scaler is None else None
        G_sums = [nothing if layer.sums is None else layer.sums.G for layer in layers]
        if scale is not None:  # the captures did not know it
            inverse = scale.to(step.device).square().reciprocal()
            G_sums = list(torch._foreach_mul(G_sums, inverse))
        roots: list[list[Tensor]] = [
            [state[key] for state in of_layers] for key in root_keys(options["damping_split"])
        ]
        roots += [[nothing] * len(layers)] * (4 - len(roots))
        index = {p: i for i, p in enumerate(step.params)}
        params, grads = list(step.params), list(step.grads)
        buffers = [state.get("momentum_buffer", nothing) for state in states]
        for layer in layers:
            if self._capture.matrix(layer.weight) is not layer.weight:
                for tensors in (params, grads, buffers):
                    i = index[layer.weight]
                    tensors[i] = tensors[i].detach().mT if tensors[i].dim() == 2 else tensors[i]
        torch.ops.torchium.kfac_step_(
            params,
            grads,
            [state["step"] for state in states],
            buffers,
            self._status(step),
            [state["A"] for state in of_layers],
            [state["G"] for state in of_layers],
            *roots,
            [state["factor_updates"] for state in of_layers],
            [state["root_failures"] for state in of_layers],
            [nothing if layer.sums is None else layer.sums.A for layer in layers],
            G_sums,
            [number for layer in layers for number in layer.row(index)],
            lrs=step.lrs(),
            momentums=step.per_param("momentum"),
            weight_decays=step.per_param("weight_decay"),
            maximize=step.per_param("maximize"),
            dampings=[group["damping"] for group in groups],
            stat_decays=[group["stat_decay"] for group in groups],
            floors=[group["eps"] for group in groups],
            batch_averaged=options["batch_averaged"],
            kl_clip=options["kl_clip"],
            damping_split=options["damping_split"],
            root_method=options["root_method"],
            found_inf=found_inf,
        )

    def _note_skip(self, params: list[Tensor]) -> None:
        super()._note_skip(params)
        for param in params:
            self._has_factors.pop(param, None)

    # ---- state

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._has_factors: dict[Tensor, bool] = {}
        self._capture.shapes.clear()

    def _loaded_state(
        self, index: int, group: dict[str, Any], saved: dict[Tensor, dict[str, Any]]
    ) -> dict[Tensor, State]:
        fresh: dict[Tensor, State] = {}
        for param, values in saved.items():
            fresh[param] = {"step": fresh_step(param)}
            if not FACTOR_KEYS.isdisjoint(values) and param.dim() in (2, 4) and param.numel() > 0:
                split = saved_split(values, group["damping_split"])
                fresh[param] |= saved_factors(param, values, split)
        fill_state(
            fresh,
            saved,
            OptionalState(("momentum_buffer",)),
            lambda param: parameter_name(index, group, param),
        )
        return fresh
