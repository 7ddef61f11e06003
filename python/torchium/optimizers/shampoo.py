"""Shampoo, and the same with AdamW's signature."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from .._sharded import is_dtensor
from ._blocked.adamw import (
    ADAMW_OPTIONS,
    SHAMPOO,
    adopt,
    check_keywords,
    options_beside_adamw,
    shampoo_options,
)
from ._blocked.base import BlockedOptimizer, Groups
from ._blocked.report import ParameterReport, ShampooReport
from ._blocked.sharing import SHARING_ARGUMENTS, Sharing
from ._blocked.state_shares import state_shares
from ._core.checkpoint import own_state
from ._core.model_groups import model_groups
from ._core.parameters import State
from ._core.process_groups import Consolidating, group_named, set_within

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Shampoo(Consolidating, BlockedOptimizer):
    r"""Preconditions each mode of a gradient tensor by a root of its own second moment.

    A gradient :math:`G` of order :math:`k` (after its unit dimensions are dropped, adjacent
    dimensions merged and blocks of at most ``block_size`` cut) has one statistics matrix
    :math:`L_i` per mode. At the parameter's step :math:`t`:

    1. :math:`G \leftarrow G + \text{weight\_decay}\,\theta`, or with ``decoupled_weight_decay``
       :math:`\theta \leftarrow (1 - \text{lr}\,\text{weight\_decay})\,\theta` before the update;
    2. :math:`L_i \leftarrow \beta_2 L_i + (1 - \beta_2)\,\mathrm{mat}_i(G)\,\mathrm{mat}_i(G)^\top`,
       a plain sum for :math:`\beta_2 = 1`;
    3. when roots are due,
       :math:`R_i = (L_i / (1 - \beta_2^t) + \text{eps}\,I)^{-1/(2k)}` (no correction for
       :math:`\beta_2 = 1`);
    4. the direction is :math:`G`, or its exponential average with :math:`\beta_1 > 0`, multiplied by
       :math:`R_i` in every mode;
    5. ``grafting`` scales the direction of each block to the norm that the grafted method's
       direction has there;
    6. momentum, and :math:`\theta \leftarrow \theta - \text{lr}\,d`.

    Roots are due at every multiple of ``update_freq`` and, while these are closer together, at steps
    1 to 8, 10, 12, 14, 16, 20, ...: four per power of two, because statistics change fastest at first.
    In between, the last roots are used. Every parameter counts its own steps; steps without a gradient
    do not count.

    Statistics, roots (but for ``root_dtype``) and averages are float32 (float64 for float64
    parameters), also under bfloat16 and float16 parameters. A gradient that is not finite, or too
    large to square (in float32 above 3.3e18 divided by the square root of its elements and steps),
    skips the whole step of its group. A root that is not finite or not accurate is never used: the
    matrix keeps its last good root.

    Sources: Gupta, Koren, Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization",
    ICML 2018, `arXiv:1802.09568 <https://arxiv.org/abs/1802.09568>`_; blocks and grafting: Anil,
    Gupta, Koren, Regan, Singer, "Scalable Second Order Optimization for Deep Learning", 2020,
    `arXiv:2002.09018 <https://arxiv.org/abs/2002.09018>`_; Shi et al., "A Distributed Data-Parallel
    PyTorch Implementation of the Distributed Shampoo Optimizer", 2023,
    `arXiv:2309.06497 <https://arxiv.org/abs/2309.06497>`_.

    Args:
        params (Module or iterable): a model, or parameters, named parameters or dicts of parameter
            groups. Of a model, all parameters are optimized, each once, under their names; those of
            ``nn.Embedding`` and ``nn.EmbeddingBag``, also if a head shares them, are a second group,
            with ``preconditioned=False``. Parameters are dense, real, float32, float64, bfloat16 or
            float16, of any order. Every option below may be set per group.
        lr (float or Tensor): learning rate, at least 0. A tensor has one element (default: 0.03).
        eps (float): damping added to the statistics before the root (default: 1e-4).
        update_freq (int): steps between two computations of the roots (default: 100).
        weight_decay (float): L2 penalty, or decoupled decay (default: 0).
        betas (tuple of two floats): decay of the average of the gradient, in [0, 1), and of the
            statistics, in [0, 1]; 1 sums them (default: (0.0, 1.0)).
        momentum (float): momentum of the preconditioned direction, in [0, 1) (default: 0).
        nesterov (bool): Nesterov momentum; needs ``momentum`` (default: False).
        decoupled_weight_decay (bool): decay the parameters instead of adding to the gradient
            (default: False).
        relative_eps (float): additional damping, as a fraction of the largest eigenvalue (default: 0).
        block_size (int): largest dimension of a block (default: 1024).
        merge_dims (bool): merge adjacent dimensions of tensors of order above two while their
            product stays within ``block_size``; a tensor of order four, such as the weight of a
            ``Conv2d``, becomes [out, in kh kw] (default: True).
        target_order (int, optional): merge dimensions by the rule of Distributed Shampoo's
            ``target_parameter_dimensionality`` instead. :math:`t \geq 1`: dimensions of size one are
            dropped, and adjacent ones merge, from the last backwards, while their product stays
            within ``block_size`` and more than :math:`t` are left; with 1 a small matrix becomes a
            vector, which ``preconditioner_1d`` rules. 0, its ``math.inf``: the shape as it is, with
            dimensions of size one. Needs ``merge_dims`` (default: None).
        exponent (float, optional): negative power of the statistics instead of :math:`-1/(2k)`
            (default: None).
        exponent_warmup (int): during this many first steps of a parameter the exponent goes from
            :math:`-1/(2k)` to ``exponent``, as :math:`-1/p` with whole numbers :math:`p` at equal
            intervals: with few samples, small eigenvalues are mostly noise and would dominate the
            step. :meth:`update_preconditioners` and ``capturable`` steps use ``exponent`` at once
            (default: 0).
        preconditioner_1d (str): ``"diagonal"`` keeps only the diagonal for parameters of order 0
            and 1, such as biases and norms: :math:`(a + \text{eps})^{-1/2}`, renewed in every step;
            ``"full"`` treats them as the others, with :math:`k = 1` (default: "diagonal").
        preconditioned (bool): False: no matrices precondition the parameters. With ``grafting``
            ``"adagrad"``, ``"rmsprop"`` or ``"adam"`` they take the direction of the grafted method
            itself, and only its state: in a :class:`ShampooW` that is AdamW's step. Else they take the
            diagonal rule above (default: True).
        max_preconditioned_dim (int, optional): parameters with a longer dimension, after
            merging, are treated as with ``preconditioned=False``: an embedding or a head with
            a large vocabulary, for which the matrices of the other dimension alone would cost more
            than the rest of its step. None: no limit (default: 16384).
        grafting (str, optional): None, ``"sgd"``, ``"adagrad"``, ``"rmsprop"`` or ``"adam"``
            (default: None).
        grafting_eps (float): added to the denominator of the grafted method (default: 1e-8).
        grafting_beta2 (float, optional): decay of the grafted second moment, in [0, 1). None:
            ``betas[1]``, or 0.999 when that is 1 (default: None).
        start_preconditioning_step (int): before this step the grafted direction, or the gradient,
            is used (default: 1).
        root_method (str): ``"eigh"``, ``"newton"`` or ``"auto"``; see
            :func:`torchium.linalg.matrix_inverse_root` (default: "auto").
        root_dtype (torch.dtype, optional): dtype of the stored roots. ``torch.bfloat16`` (or
            ``"bfloat16"``) halves their memory, with an error of at most 0.4 % per entry. They are
            computed and applied in the state dtype. None: the state dtype (default: None).
        matmul_precision (str, optional): precision of the products with gradients on a GPU.
            ``"highest"``: operands of at least 22 bits; ``"high"``: 11 bits, as TF32, with relative
            errors of about 4e-4 in statistics and directions; None: as set by
            :func:`torch.set_float32_matmul_precision`. A CPU computes in float32 (default: None).
        max_root_failures (int): consecutive failures of one root after which ``RuntimeError`` is
            raised (default: 3).
        maximize (bool): go up instead of down (default: False).
        capturable (bool): :meth:`step` never computes roots, so that it can be captured in a CUDA
            graph; call :meth:`update_preconditioners` for them. A captured step keeps the ``lr`` of
            its capture, unless that is a tensor on the GPU. With a ``process_group`` it needs the
            backend NCCL, and no host waits (default: False).
        graphs (str or bool): steps on a GPU are captured in CUDA graphs after some steps, and
            replayed: the same results, bit for bit, with far less work for the host. ``"auto"``:
            where the memory that the graphs keep is at most 5 % of the state or 1 % of the device's;
            ``"always"`` or True; ``"never"`` or False. Steps that a caller captures are not affected
            (default: "auto").
        process_group (ProcessGroup, optional): the ranks that share the step, under
            ``DistributedDataParallel``: parameters and gradients are the same on all of them. Each keeps
            the state of its own blocks and computes their directions, which all gather. All ranks must
            call :meth:`step`, and :meth:`state_dict` in :meth:`consolidating`. None: this process takes
            the whole step (default: None).
        comm_dtype (torch.dtype): dtype in which directions travel: ``torch.float32``, ``torch.bfloat16`` or
            ``torch.float16``; those of float64 parameters travel in float64 (default: torch.float32).
        bucket_bytes (int): directions travel in buckets, of which a rank receives at most this many bytes, or
            a block of each rank if that is more, while those that have arrived are applied. Each rank keeps
            memory for two (default: 2**25).

    Raises:
        ValueError: an option is out of its range, or a parameter is sparse, complex, integer,
            expanded, or a flat shard of ``FullyShardedDataParallel``; a ``DTensor`` is partial; or plain
            parameters that require gradients are mixed with ``DTensor`` ones without a ``process_group``.

    .. note::
        Schedulers that cycle momentum (``OneCycleLR``, ``CyclicLR``) cycle ``betas[0]``, as they do
        for Adam. Pass them ``cycle_momentum=False`` to cycle the learning rate alone.

    Example:
        >>> model = torch.nn.Linear(10, 2)
        >>> optimizer = torchium.Shampoo(model.parameters(), lr=0.1, grafting="adagrad")
        >>> loss = model(torch.randn(8, 10)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    _OPTIONS = SHAMPOO
    _OWN_OPTION = "grafting"
    _can_share = True
    _PART = "the state of its own blocks"
    _keeps_shares = False  # in state_dict()

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 0.03,
        eps: float = 1e-4,
        update_freq: int = 100,
        weight_decay: float = 0.0,
        *,
        betas: tuple[float, float] = (0.0, 1.0),
        momentum: float = 0.0,
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        relative_eps: float = 0.0,
        block_size: int = 1024,
        merge_dims: bool = True,
        target_order: int | None = None,
        exponent: float | None = None,
        exponent_warmup: int = 0,
        preconditioner_1d: str = "diagonal",
        preconditioned: bool = True,
        max_preconditioned_dim: int | None = 16384,
        grafting: str | None = None,
        grafting_eps: float = 1e-8,
        grafting_beta2: float | None = None,
        start_preconditioning_step: int = 1,
        root_method: str = "auto",
        root_dtype: torch.dtype | str | None = None,
        matmul_precision: str | None = None,
        max_root_failures: int = 3,
        maximize: bool = False,
        capturable: bool = False,
        graphs: str | bool = "auto",
        process_group: ProcessGroup | None = None,
        comm_dtype: torch.dtype = torch.float32,
        bucket_bytes: int = 2**25,
    ) -> None:
        self._sharing = Sharing.of(process_group, comm_dtype, bucket_bytes)
        defaults = self._OPTIONS.given(locals())
        super().__init__(
            model_groups(params) if isinstance(params, nn.Module) else params, defaults
        )

    @staticmethod
    def from_adamw(
        optimizer_or_params: Optimizer | ParamsT | nn.Module, **hyperparameters: Any
    ) -> ShampooW:
        """A :class:`ShampooW` that replaces an AdamW, or takes its keywords.

        Every block of a matrix takes a step of the length that AdamW would take; parameters of order 0
        and 1, such as biases and norms, and those that are not ``preconditioned`` step as with AdamW.
        State starts fresh, without AdamW's averages.

        Args:
            optimizer_or_params (Optimizer, Module or iterable): a :class:`torch.optim.AdamW`, or a
                :class:`torch.optim.Adam`, whose weight decay is an L2 penalty. Its parameter groups are
                copied with all options, names of parameters and keys of schedulers. It is not changed,
                and must no longer be stepped. A scheduler that was made for it does not change the
                rates of the new optimizer: make another. Or the parameters of :class:`ShampooW`.
            **hyperparameters: those of :class:`ShampooW`; with an optimizer, only those that AdamW does
                not have. ``capturable`` is not copied from an optimizer, because roots would then be
                left to :meth:`update_preconditioners`.

        Raises:
            ValueError: ``amsgrad=True`` or ``differentiable=True``; another kind of optimizer; an
                option of AdamW together with an optimizer; or as the constructor.

        Example:
            >>> model = torch.nn.Linear(10, 2)
            >>> optimizer = torchium.Shampoo.from_adamw(model, lr=1e-3)
            >>> adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
            >>> optimizer = torchium.Shampoo.from_adamw(adamw, update_freq=20)
        """
        check_keywords("Shampoo.from_adamw", hyperparameters)
        if not isinstance(optimizer_or_params, Optimizer):
            return ShampooW(optimizer_or_params, **hyperparameters)
        sharing = {k: hyperparameters.pop(k) for k in SHARING_ARGUMENTS if k in hyperparameters}
        groups, options = adopt(optimizer_or_params, hyperparameters)
        return ShampooW(groups, **options, **sharing)

    @torch.no_grad()
    def update_preconditioners(self) -> None:
        """Computes the roots of all statistics now, regardless of the schedule.

        With ``capturable=True`` only this method computes roots: call it regularly between the replays
        of a captured :meth:`step`. After it has run once, it can then be captured in a CUDA graph
        itself. Parameters that have taken no step are left out.

        Raises:
            RuntimeError: as :meth:`step`, or a graph is captured without ``capturable=True``.
        """
        self._renew_roots()

    def sharding(self) -> AbstractContextManager[None]:
        """A block that all ranks run, in which :meth:`state_dict` returns this rank's share of the state.

        For ``torch.distributed.checkpoint``, which saves each block from its owner and reads checkpoints of
        any number of ranks: no rank has the whole state. Without ranks that share the step, nothing changes.

        Example:
            >>> with optimizer.sharding():
            ...     state = get_optimizer_state_dict(model, optimizer)
            >>> dcp.save({"optimizer": state}, checkpoint_id="checkpoint")
            >>> dcp.load({"optimizer": state}, checkpoint_id="checkpoint")
            >>> set_optimizer_state_dict(model, optimizer, state)
        """
        return set_within(self, "_keeps_shares")

    def _ranks_of_state(self) -> str:
        return self._sharing.group_name

    def _is_partial(self) -> bool:
        return bool(self._sharing.group_name) and (
            self._all_ranks_call() or not self._owns_all_state()
        )

    def _is_in_block(self) -> bool:
        return super()._is_in_block() or self._keeps_shares

    def _all_ranks_call(self) -> bool:
        return super()._all_ranks_call() or self._has_shards()

    def _has_shards(self) -> bool:
        return any(is_dtensor(p) for group in self.param_groups for p in group["params"])

    def _owns_all_state(self) -> bool:
        alone = group_named(self._sharing.group_name).size() == 1
        return alone or not any(self._has_state(p) for p in self.state)

    def _state_to_save(self) -> defaultdict[Tensor, Any]:
        state = defaultdict(dict, self.state)
        try:
            groups = self._groups()
        except BaseException:
            self._withdraw()
            raise
        saved = self._shares(groups) if self._keeps_shares else self._plans.whole_states(*groups)
        for group, states in zip(self.param_groups, saved, strict=True):
            for param, own in zip(group["params"], states, strict=True):
                before = state.pop(param, {})
                others = {k: v for k, v in before.items() if k not in own_state(before)}
                if own or others:
                    state[param] = {**others, **own}
        return state

    def _own_state_to_save(self) -> defaultdict[Tensor, Any]:
        """What begins afresh with changed options does so in a checkpoint or copy too."""
        if self._sharing.group_name or self._has_shards():
            return self.state
        try:
            saved = self._plans.whole_states(*self._groups())
        except (KeyError, ValueError):  # of a wrong option: the next step raises it
            return self.state
        state = defaultdict(dict, self.state)
        for group, states in zip(self.param_groups, saved, strict=True):
            for param, own in zip(group["params"], states, strict=True):
                if own:
                    state[param] = {**state[param], **own}
        return state

    def __getstate__(self) -> dict[str, Any]:
        with self._holding(self._own_state_to_save()):
            return super().__getstate__()

    def _shares(self, groups: Groups) -> list[list[State]]:
        return [
            [
                state_shares(whole, state, dims, blocks, self._plans.owners(tensor))
                if is_share
                else state
                for tensor, state, (whole, is_share, dims, blocks) in zip(*of_group, strict=True)
            ]
            for of_group in zip(
                groups[1], groups[3], self._plans.share_places(*groups), strict=True
            )
        ]

    def report(self) -> ShampooReport:
        """For each parameter the rule, the blocks or the reason, and the bytes of state.

        Allocates nothing.

        Returns:
            A report with one entry per parameter in ``parameters``; ``print`` shows a table.

        Example:
            >>> print(torchium.Shampoo(model).report())
        """
        lines, table = self._plans.report(*self._groups())
        return ShampooReport(
            tuple(ParameterReport(name, tuple(shape), *rest) for name, shape, *rest in lines),
            table,
        )


class ShampooW(Shampoo):
    """Shampoo as a replacement for AdamW: same signature and step lengths, better directions.

    It grafts Adam and keeps the meaning of AdamW's ``lr``, ``betas``, ``eps`` and decoupled weight
    decay: learning rates and schedules that suit AdamW suit it too. Every block of a matrix takes a
    step of the length that AdamW would take; parameters of order 0 and 1, such as biases and norms,
    and those that are not ``preconditioned`` step as with AdamW. The defaults of all other options
    were found by experiment (``docs/choosing_and_tuning.md``).
    Use the class wherever one with the signature of :class:`torch.optim.AdamW` is expected, as in
    ``optimizer_cls_and_kwargs`` of a Trainer; :meth:`Shampoo.from_adamw` makes one too.

    Args:
        params (Module or iterable): as for :class:`Shampoo`. ``eps`` and ``betas`` of parameter
            groups are AdamW's, also in :meth:`add_param_group`.
        lr (float or Tensor): learning rate (default: 1e-3).
        betas (tuple of two floats): decay of the averages of the gradient, and of its square and
            the statistics (default: (0.9, 0.999)).
        eps (float): AdamW's; ``grafting_eps`` of Shampoo, whose own ``eps`` becomes its square
            (default: 1e-8).
        weight_decay (float): decoupled weight decay (default: 1e-2).
        amsgrad (bool): must be False.
        maximize (bool): go up instead of down (default: False).
        foreach, fused: ignored.
        capturable (bool): as in :class:`Shampoo`: only :meth:`update_preconditioners` then computes
            roots (default: False).
        differentiable (bool): must be False.
        **options: all other options of :class:`Shampoo`. Defaults that differ from its own:
            ``grafting="adam"``, ``exponent=-0.5``, ``exponent_warmup=100``, ``relative_eps=1e-3``,
            ``update_freq=10``.

    ``param_groups``, ``defaults`` and checkpoints hold Shampoo's options, so that a :class:`Shampoo`
    with the same options can load a checkpoint of this class, and vice versa. Such groups and defaults
    may be passed to this class again.

    Raises:
        ValueError: ``amsgrad=True`` or ``differentiable=True``; or as :class:`Shampoo`.

    Example:
        >>> model = torch.nn.Linear(10, 2)
        >>> optimizer = torchium.ShampooW(model, lr=1e-3, weight_decay=0.05)
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        given = locals()
        check_keywords(type(self).__name__, options)
        adamw = {name: given[name] for name in (*ADAMW_OPTIONS, "capturable") if name in given}
        own = self._own_options(adamw | options)
        super().__init__(params, **{**options_beside_adamw(), **own})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, whose ``eps`` and ``betas`` are AdamW's.

        A group with every option of Shampoo, as in ``param_groups``, keeps its ``eps``.
        Options left out are the optimizer's. Raises ``ValueError``, and adds nothing, as
        :meth:`Shampoo.add_param_group`.
        """
        is_group = isinstance(param_group, dict)  # else torch's own message is clear
        super().add_param_group(self._own_options(param_group) if is_group else param_group)

    def _own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Converts options whose ``eps`` is AdamW's.

        A dict with all options of Shampoo is a group or the defaults of such an optimizer.
        """
        is_shampoo = options.keys() >= set(self._OPTIONS.names)
        return shampoo_options(options, with_eps=not is_shampoo)
