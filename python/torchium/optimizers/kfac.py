"""K-FAC."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ._core.capturing import CapturingOptimizer, ParamsOrModel
from ._core.factors import FactorCapture, SkippedLayers, checked_skip_layers
from ._core.options import OptionList, as_float
from ._core.plan import JointPlan
from ._core.process_groups import Consolidating
from ._core.schedules import Group, schedules_in
from ._core.treatments import KFACReport as KFACReport
from ._core.treatments import TreatmentReports

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class KFAC(Consolidating, TreatmentReports, CapturingOptimizer):
    r"""Preconditions the gradient of each layer by the Kronecker factors of its Fisher matrix.

    For a layer with inputs :math:`a` (a 1 appended for the bias) and gradients :math:`g` of the loss
    of single samples at its outputs, :math:`A = E[a a^\top]` and :math:`G = E[g g^\top]`
    approximate the block of the empirical Fisher matrix by :math:`A \otimes G`. With ``fisher="ggn"`` or
    ``"mc"``, :math:`G` comes from the Hessian of the loss with respect to the model's outputs instead
    (:meth:`update_curvature`). With :math:`V` the gradient of weight and bias in ``.grad``, in this order:

    1. :math:`V \leftarrow V + \text{weight\_decay}\,\theta`;
    2. the direction :math:`D = (G + \sqrt{\text{damping}}/\pi\,I)^{-1}\, V\,
       (A + \pi \sqrt{\text{damping}}\,I)^{-1}`, or with ``damping_split="exact"``
       :math:`(A \otimes G + \text{damping}\,I)^{-1} V`. With ``ekfac=True``
       :math:`D = U_G\,((U_G^\top V U_A) / (s + \text{damping}))\,U_A^\top`, with eigenvectors :math:`U` and
       :math:`s = E[(U_G^\top D_n U_A)^2]` over the gradients :math:`D_n` of samples, element by element;
    3. the KL clip scales the directions of all layers together by
       :math:`\min(1, \sqrt{\text{kl\_clip} / |\sum \text{lr}^2\, V \cdot D|})`;
    4. momentum, and :math:`\theta \leftarrow \theta - \text{lr}\,D`.

    Factors are captured at the steps 1, 1 + ``TCov``, ... and averaged:
    :math:`A \leftarrow d_k A + (1 - d_k) A_\text{new}` with
    :math:`d_k = \min(1 - 1/k, \text{stat\_decay})` for the k-th update. Inverses are due at the
    steps 1, 1 + ``TInv``, .... Layers with :math:`T` positions per sample (sequences, convolutions) sum
    over them: :math:`A = \sum a a^\top / (N T)`, :math:`G = \sum g g^\top / N`; or with
    ``weight_sharing="reduce"`` :math:`a` is the mean and :math:`g` the sum over the positions of a sample.
    :math:`s` of EKFAC is averaged like the factors, in the current eigenvectors. New ones change it to the
    diagonal that the same matrix has in their basis, and before its first average it is
    :math:`\lambda_G \lambda_A^\top`, the eigenvalues of K-FAC.

    Layers are ``nn.Linear`` (any leading dimensions; dimension 0 is the sample), the ``Conv1D`` of
    transformers, ``nn.Conv1d`` to ``nn.Conv3d``, ``nn.Embedding``, ``nn.LayerNorm`` and ``nn.RMSNorm``
    (those of other libraries too, known by what they compute), ``nn.GroupNorm``, ``nn.BatchNorm1d`` to
    ``nn.BatchNorm3d``, and both projections of ``nn.MultiheadAttention`` (the packed one of queries, keys and
    values where all three are the same tensor), also in transformer layers with
    ``batch_first=False``, also if a weight is shared or a layer is used several times. Scale and shift of a norm have a 2 x 2 block of the Fisher matrix for each channel
    (unit-wise: Osawa et al. 2019, section 4.2), :math:`D_c = (F_c + \text{damping}\,I)^{-1} V_c` with
    :math:`F_c = E[(u, v)^\top (u, v)]` of their gradients; it is averaged like the factors and solved in
    every step. Statistics of a batch count as constants there. The weight of a linear layer may be that of
    an embedding too (a tied head). The input factor of an embedding is diagonal, the frequencies of its
    words; as the first dimension of its weight is that of the words, it is called G. Other parameters, and
    weights that are also used outside of their layers, take steps of SGD with momentum; a warning counts
    them once, and :meth:`report` names them with the reason. Among them are tables whose rows samples share, as
    those of positions :math:`[T]`. Uses outside are looked for where
    factors are captured, and what is found holds until the next time.

    A transposed convolution (``nn.ConvTranspose1d`` to ``nn.ConvTranspose3d``) has the weight
    :math:`[in, out / groups, \dots]` of the convolution from its output to its input, and the gradient
    :math:`\sum x\,p^\top` over the positions of its input :math:`x`, with :math:`p` the patch of the output
    gradient that a position has spread to. So :math:`A` is that of :math:`p` and :math:`G` that of :math:`x`:
    :math:`A = \sum p\,p^\top / N` and :math:`G = \sum x\,x^\top / (N T)`. Its bias has no row there, and falls
    back.

    Micro-batches with loss / k, one ``backward()`` each, equal one batch. Calls of a layer in one backward
    pass are positions of the same samples: a batch that goes through the model in parts needs a
    ``backward()`` for each part. A warning names layers whose parts differ in size; parts of one size look like
    shared weights. Another warning names layers with more or fewer rows in dimension 0 than most, such
    as windows of images or tokens of experts: rows count as samples, and :math:`G` is in proportion to their
    number. Losses of one forward pass are added up before ``backward()``: a second pass over a retained graph
    counts the samples again, with a warning.
    Passes without ``backward()`` between two steps leave no trace. ``zero_grad()`` of the optimizer
    forgets what was captured, and so does every step, except one that raises for a wrong option.

    ``damping``, ``TCov``, ``TInv``, ``stat_decay`` and ``kl_clip`` may be functions of the step number,
    also for a single group, and also set later in ``param_groups``. The number is 1 for the first step: 1 +
    the steps that a parameter of the group (for ``kl_clip``: of any group) has taken at most, so that skipped
    steps do not count. The factors are due at step :math:`t` if :math:`t - 1` is divisible by the value of ``TCov`` at :math:`t`; the
    same holds for ``TInv``. ``param_groups`` has the value in effect under the name of the option, and the
    function under ``"schedules"``, where it may be replaced or deleted. A number that is set by hand lasts
    until the next step. Functions are called before the first forward pass of a step that may be captured,
    and again in ``step()``: they should depend on the number alone. A value out of range raises
    ``ValueError``, at construction for step 1, else in ``step()``, and changes nothing. As with
    ``torch.optim.lr_scheduler.LambdaLR``, ``state_dict()`` has the values but no functions; an optimizer that
    loads it keeps its own, and its step number is that of the checkpoint. Copies keep the functions, and so
    do pickles, if the functions can be pickled: functions of a module can, and ``functools.partial`` of them, or
    an object with a method ``__call__``; lambdas and functions within functions cannot.

    A gradient that is not finite, or too large to square (as for :class:`Shampoo`), skips the whole
    step, and so do inputs and output gradients of layers whose sums of squares overflow. A root that
    is not finite or not accurate is never used: the layer keeps its last good one, and three
    failures in a row raise ``RuntimeError``. State is float32 (float64 for float64 parameters), but for
    ``factor_dtype``.

    Sources: Martens, Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate
    Curvature", ICML 2015, `arXiv:1503.05671 <https://arxiv.org/abs/1503.05671>`_; convolutions:
    Grosse, Martens, ICML 2016, `arXiv:1602.01407 <https://arxiv.org/abs/1602.01407>`_; shared
    weights: Eschenhagen et al., NeurIPS 2023,
    `arXiv:2311.00636 <https://arxiv.org/abs/2311.00636>`_; EKFAC: George et al., "Fast Approximate
    Natural Gradient Descent in a Kronecker-factored Eigenbasis", NeurIPS 2018,
    `arXiv:1806.03884 <https://arxiv.org/abs/1806.03884>`_; ``solver="inverse_free"``: Lin et al., "Structured
    Inverse-Free Natural Gradient Descent", ICML 2024, `arXiv:2312.05705 <https://arxiv.org/abs/2312.05705>`_;
    the KL clip: Ba, Grosse, Martens, "Distributed Second-Order Optimization using Kronecker-Factored
    Approximations", ICLR 2017; norms: Osawa et al., CVPR 2019,
    `arXiv:1811.12019 <https://arxiv.org/abs/1811.12019>`_.

    Args:
        params_or_model (nn.Module or iterable): the model, or parameters, named parameters or dicts
            of parameter groups: then their layers are found when they run. Parameters are dense,
            real, float32, float64, bfloat16 or float16, all on one device. Every option but
            ``batch_averaged``, ``kl_clip``, ``damping_split``, ``ekfac``, ``solver``, ``fisher``,
            ``adaptive_damping`` and ``graphs`` may be set for a group; the group of its weight decides for a layer.
        lr (float or Tensor): learning rate, at least 0. A tensor has one element (default: 0.003).
        momentum (float): momentum of the direction, in [0, 1) (default: 0.9).
        weight_decay (float): L2 penalty, which is preconditioned as the gradient is (default: 0).
        damping (float or callable): added to the Fisher matrix, at least 0 (default: 0.01).
        TCov (int or callable): steps between two updates of the factors (default: 5).
        TInv (int or callable): steps between two inversions of the factors (default: 10).
        batch_averaged (bool): the loss is a mean over the samples, not a sum (default: True).
        eps (float): floor of the damping of a factor, and with ``damping_split="exact"`` of its
            eigenvalues (default: 1e-8).
        stat_decay (float or callable): decay of the averages of the factors, in [0, 1] (default: 0.95).
        kl_clip (float or callable, optional): bound of the step in the metric of the Fisher matrix, above 0.
            None: no bound (default: 1e-3).
        damping_split (str): ``"pi"``, with :math:`\pi^2` the ratio of the mean eigenvalues of A and G;
            ``"plain"``, with :math:`\pi = 1`; or ``"exact"`` (default: "pi").
        ekfac (bool): EKFAC. No other eigenvalues for these eigenvectors are closer to the Fisher matrix, in
            the Frobenius norm, than :math:`s`. :math:`D_n` is the sum of :math:`g a^\top` over the positions
            of a sample, also with ``weight_sharing="reduce"``; several calls of a layer, and lookups of a
            tied head, count as samples of their own. State grows by the size of the weight. Needs
            ``damping_split="exact"`` (default: False).
        solver (str): how factors are inverted. ``"eigh"``: by eigenvalues. ``"cholesky"``: by Cholesky factors,
            and on the CPU by eigenvalues where a pivot is lost in rounding. ``"newton"``: by a coupled Newton
            iteration, which raises damping below :math:`2^{-20}` of the Frobenius norm of a factor to that
            (:math:`2^{-46}` in float64). ``"auto"``: ``"newton"`` in float32 on a CUDA device with kernels
            for it, else ``"cholesky"``. ``damping_split="exact"`` needs eigenvectors, and so ``"eigh"`` or
            ``"auto"``, which are the same there (default: "auto").

            ``"inverse_free"`` (SINGD) inverts nothing. Instead of the factors it stores :math:`K` and :math:`C`
            with :math:`(A \otimes G + \text{damping}\,I)^{-1} \approx K K^\top \otimes C C^\top`, and
            :math:`D = C C^\top V K K^\top`. They begin as the identity, so that the first steps are those of
            SGD. With each new :math:`A` and :math:`G`, :math:`\text{tr}` the mean of a diagonal, :math:`P` the
            projection to the structure, and :math:`b = \min(1 - \text{stat\_decay}, 1 / (2 \|m_K\|))` with the largest
            sum of magnitudes in a row as the norm,

            .. math::
                m_K &\leftarrow \text{alpha1}\, m_K + \tfrac{1 - \text{alpha1}}{2} P\bigl(
                \text{tr}(C^\top G C) K^\top A K + \text{damping}\, \text{tr}(C^\top C) K^\top K - I\bigr), \\
                K &\leftarrow K (I - b\, m_K),

            and the same for :math:`C`, with the roles exchanged. ``TInv`` and ``damping_split`` have no meaning
            then and must have their defaults. It stays accurate in bfloat16 (``factor_dtype``).
        structures (tuple of str): ``solver="inverse_free"``: the structures of :math:`K` and of :math:`C`.
            ``"dense"``; ``"block_diagonal"``; ``"toeplitz"``, lower triangular; or ``"diagonal"``. With factors of
            order n they take :math:`n^2`, :math:`n b`, n and n numbers each. The :math:`C` of an embedding or a
            tied head is always diagonal, and so is one of structure "dense" above ``max_factor_size``. A new value
            counts for factors that do not exist yet (default: ("dense", "dense")).
        block_size (int): order of the blocks of ``"block_diagonal"`` but the last, at least 2; as ``structures``
            (default: 32).
        alpha1 (float): ``solver="inverse_free"``: decay of the averages :math:`m_K` and :math:`m_C`, in [0, 1)
            (default: 0.5).
        fisher (str): where :math:`G` comes from. ``"empirical"``: the gradients of the loss. ``"ggn"``: the
            Hessian of the loss with respect to the model's outputs (the generalized Gauss-Newton matrix).
            ``"mc"``: an estimate of it by targets drawn from the model's own distribution (the Fisher
            matrix). The last two need :meth:`update_curvature` in each iteration. A new value counts from
            the next factors on (default: "empirical").
        weight_sharing (str): how several positions of a sample count. ``"expand"``: each is an :math:`a`
            and a :math:`g`. ``"reduce"``: a sample has one :math:`a`, the mean over its positions, and one
            :math:`g`, their sum; exact where the model averages the outputs of the layer over the
            positions. Several calls of a layer, and lookups, are always expanded. A new value
            counts from the next factors on (default: "expand").
        max_factor_size (int): of a factor of a larger order only the diagonal is kept; a warning and
            :meth:`report` name those. G of an embedding or a tied head is always a diagonal. A factor of order n
            takes :math:`8 n^2` bytes with its inverse, and an inversion of order :math:`n^3` operations.
            A new value counts for factors that do not exist yet (default: 5000).
        factor_dtype (torch.dtype, optional): dtype of the stored factors :math:`A` and :math:`G`, or of :math:`K`,
            :math:`C`, :math:`m_K` and :math:`m_C`: ``torch.bfloat16``, ``torch.float32``, ``torch.float64`` or
            their names. Sums, and solves of bfloat16
            factors, are in float32; everything else that is stored keeps its dtype. bfloat16 halves the memory
            of the factors and rounds them to 8 bits, :math:`2^{-9}` of the largest entry: damping of a factor
            should be above that. A new value converts them. None: float32, or
            float64 for float64 parameters (default: None).
        adaptive_damping (bool): :meth:`update_damping` may be called. Needs ``momentum=0``, and
            a number as ``damping`` (default: False).
        grad_scaler (GradScaler, optional): scales the loss, under mixed precision; its scale is taken
            out of the factors. Needed only if its ``unscale_()`` is called before ``step()`` and
            ``fisher="empirical"``. It may be set later as an attribute; a copy of the optimizer has none
            (default: None).
        maximize (bool): go up instead of down (default: False).
        graphs (str or bool): steps on a GPU without new factors and inverses are captured in CUDA graphs after
            some steps, and replayed: the same results, bit for bit, with far less work for the host.
            ``"auto"``: where the memory that the graphs keep is at most 5 % of the state or 1 % of the
            device's; ``"always"`` or True; ``"never"`` or False. Steps that ranks share, of
            ``solver="inverse_free"``, with ``ekfac``, ``adaptive_damping`` or another ``factor_dtype``, or of
            parameters that no kernel knows, are launched. After a change of an option other than
            ``lr`` the first steps are launched (default: "auto").
        capturable (bool): a CUDA graph of the caller may capture :meth:`step` together with the forward and
            backward pass: every step updates the factors, and only :meth:`update_preconditioners` inverts them,
            besides the step in which they are new. ``TCov`` and ``TInv`` have no meaning then. A step before the
            capture creates state and inverses. A tensor on the device as ``lr`` may change between replays.
            Not with a ``process_group``, options that are functions, ``adaptive_damping`` or
            ``solver="inverse_free"`` (default: False).
        process_group (ProcessGroup, optional): the ranks that share the step, as under
            ``DistributedDataParallel``: parameters and gradients are the same on all of them, and each has samples of
            its own. The factors are those of all samples; the loss of a rank is the mean (or with
            ``batch_averaged=False`` the sum) over its own. All ranks must call :meth:`step`, and where they keep
            different inverses :meth:`state_dict` in :meth:`consolidating` (default: None, this process alone).
        grad_worker_fraction (float): the share of the ranks that keep the inverses of a layer and compute its
            direction: at most :math:`\max(1, \text{round}(\text{grad\_worker\_fraction}\, W))` of :math:`W`
            ranks, in (0, 1]. 1: all; inverses are sent when they are due, and nothing else. 1 / :math:`W`: one
            rank, which sends the direction in every step (KAISA: Pauloski et al. 2021,
            `arXiv:2107.01739 <https://arxiv.org/abs/2107.01739>`_). ``ekfac=True`` needs 1 (default: 1.0).
        skip_layers (list): layers without factors, whose parameters take steps of SGD with momentum: regular
            expressions, of which one is found in the name of the layer (``"head"``) or of its class
            (``"Conv"``), and classes of modules. Names are those in the model; without a model, those in
            the module that runs (default: none).

    Raises:
        ValueError: an option is out of its range or, where it must not, differs between groups; a
            parameter is sparse, complex, integer, expanded, a ``DTensor`` or a flat shard of
            ``FullyShardedDataParallel``.

    .. note::
        ``flatten_optimizer_state_dict=True`` of ``torch.distributed.checkpoint`` loads the factors only
        into an optimizer that was given the model, or whose model has run; else it drops them, without
        an error. It cannot load options that are functions.

        The hooks work under ``torch.compile``, with a break of the graph at each layer. With several
        processes of ``torch.distributed`` and no ``process_group`` :meth:`step` raises ``RuntimeError``.

    Example:
        >>> model = torch.nn.Linear(10, 2)
        >>> optimizer = torchium.KFAC(model, lr=0.1)
        >>> loss = model(torch.randn(8, 10)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    _OPTIONS = OptionList("KFAC")
    _OWN_OPTION = "TCov"
    _PLAN = "KfacPlan"
    _PART = "the inverses of some layers"
    _capture: FactorCapture
    _skip_layers: SkippedLayers

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        lr: float | Tensor = 0.003,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float | Callable[[int], float] = 0.01,
        TCov: int | Callable[[int], int] = 5,
        TInv: int | Callable[[int], int] = 10,
        batch_averaged: bool = True,
        eps: float = 1e-8,
        *,
        stat_decay: float | Callable[[int], float] = 0.95,
        kl_clip: float | Callable[[int], float | None] | None = 1e-3,
        damping_split: str = "pi",
        ekfac: bool = False,
        solver: str = "auto",
        structures: tuple[str, str] = ("dense", "dense"),
        block_size: int = 32,
        alpha1: float = 0.5,
        fisher: str = "empirical",
        weight_sharing: str = "expand",
        max_factor_size: int = 5000,
        factor_dtype: torch.dtype | str | None = None,
        adaptive_damping: bool = False,
        grad_scaler: GradScaler | None = None,
        maximize: bool = False,
        graphs: str | bool = "auto",
        capturable: bool = False,
        process_group: ProcessGroup | None = None,
        grad_worker_fraction: float = 1.0,
        skip_layers: Iterable[str | type[nn.Module]] = (),
    ) -> None:
        options = self._OPTIONS.given(locals())
        self._skip_layers = checked_skip_layers(skip_layers)
        self._grad_worker_fraction = checked_fraction(grad_worker_fraction, ekfac)
        super().__init__(params_or_model, options, grad_scaler, process_group)

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
        r"""Takes the factors of the next step from the curvature of the loss (``fisher="mc"`` and ``"ggn"``).

        Differentiates the outputs of the model by backward passes of its own, which keep the graph and change
        no ``.grad``. Call it in every iteration, once per micro-batch, after the forward pass (and
        ``zero_grad()``), and before ``step()`` and before a ``backward()`` that does not retain the graph.
        In steps without new factors (``TCov``) it does nothing. Where factors are due, :meth:`step`
        raises ``RuntimeError`` without it. The factors are means over the samples of all calls since the
        last step or ``zero_grad()``.

        Calls for several outputs of one forward pass, as of heads, have the same samples: their curvatures add
        up to that of :math:`\sum_h \text{loss}_h`, whatever the factors of these losses are in ``backward()``.
        For :math:`\sum_h w_h\, \text{loss}_h` pass ``outputs.detach().lerp(outputs, w_h ** 0.5)``, which has
        the same values and :math:`\sqrt{w_h}` times the Jacobian. Without a call for a head, its own layers
        have no factors.

        The loss of a sample is a sum over the elements :math:`e` of its outputs :math:`f` (tokens, pixels,
        units), each with the weight :math:`w`:

        - ``"cross_entropy"``: :math:`\sum_e w\, \text{ce}(f_e, y_e)`, with
          :math:`H_e = w\,(\text{diag}(p) - p p^\top)`, :math:`p = \text{softmax}(f_e)`;
        - ``"mse"``: :math:`\sum_e w\,(f_e - y_e)^2`, with :math:`H_e = 2w`;
        - ``"bce"``, of logits: :math:`\sum_e w\, \text{bce}(f_e, y_e)`, with :math:`H_e = w\,p(1 - p)`,
          :math:`p = \text{sigmoid}(f_e)`.

        :math:`w = 1` for ``reduction="sum"``. For ``"mean"`` it is one over the elements of a sample (with a
        mask, :math:`N` over those that count in the batch), as in torch's functions of these names. Neither
        targets nor a factor of the loss (accumulation, a ``GradScaler``) change these factors. Label
        smoothing does not change them either; class weights are not supported.

        ``fisher="ggn"`` takes one backward pass for each element (and class): :math:`C` for outputs
        :math:`[N, C]`. ``"mc"`` takes ``samples``, with targets drawn from the model's own distribution:
        :math:`\text{softmax}(f_e)`, the normal distribution :math:`N(f_e, \tfrac12)`, or Bernoulli
        :math:`(p)`. It is the better choice for outputs with many elements. Tokens may also be samples:
        outputs flattened to :math:`[N T, C]` give the same ``"mc"``, and take :math:`C` instead of :math:`T C`
        passes for ``"ggn"``, which is then exact if no layer mixes the positions; where gradients of a sample are
        summed over them (``weight_sharing="reduce"``, ``ekfac``, natural gradient), it raises an error. Where an
        output depends on several samples, as the similarities of a contrastive loss do, ``"ggn"`` adds cross
        terms of samples to :math:`G`, and ``"mc"`` none in expectation.

        Layers within ``torch.utils.checkpoint`` with ``use_reentrant=True`` are not reached. Hooks of
        tensors run in these passes too. Does not wait for the device.

        Args:
            outputs (Tensor): what the model returned, with its graph; dimension 0 is the sample.
            loss (str): ``"cross_entropy"``, ``"mse"`` or ``"bce"``.
            reduction (str): how the loss combines the elements of a sample, ``"mean"`` or ``"sum"``. Over
                samples it is a mean or a sum by ``batch_averaged`` (default: "mean").
            class_dim (int, optional): dimension of the classes for ``"cross_entropy"``. Needed for outputs
                of more than two dimensions: -1 for :math:`[N, \dots, C]`, 1 for torch's
                :math:`[N, C, \dots]` (default: None).
            mask (Tensor, optional): bool, the shape of the outputs without the classes; False where the
                loss ignores an element, as in ``targets != ignore_index`` (default: None).
            samples (int): targets drawn for each element, and so backward passes, of ``"mc"``
                (default: 1).
            generator (torch.Generator, optional): for these targets (default: None, that of the device).

        Raises:
            ValueError: outputs or arguments that do not fit.
            RuntimeError: ``fisher="empirical"``; the graph was freed, or the input of a layer changed in
                place.

        Example:
            >>> model = torch.nn.Linear(10, 2)
            >>> optimizer = torchium.KFAC(model, lr=0.1, fisher="ggn")
            >>> outputs, targets = model(torch.randn(8, 10)), torch.randint(2, (8,))
            >>> optimizer.update_curvature(outputs, "cross_entropy")
            >>> torch.nn.functional.cross_entropy(outputs, targets).backward()
            >>> optimizer.step()
        """
        self._update_curvature(outputs, loss, reduction, class_dim, mask, samples, generator)

    @torch.no_grad()
    def update_preconditioners(self) -> None:
        """Inverts the factors of all layers as they are now, regardless of ``TInv``.

        With ``capturable=True`` only this method inverts them: call it between the replays of a captured
        :meth:`step`. Before the first step, after a load, and for layers without a gradient in the last
        step, their next step does it. With a ``process_group`` all ranks must call it.

        Raises:
            RuntimeError: as :meth:`step`.

        Example:
            >>> model = torch.nn.Linear(10, 2)
            >>> optimizer = torchium.KFAC(model, lr=0.1, capturable=True)
            >>> for step in range(20):
            ...     optimizer.zero_grad()
            ...     model(torch.randn(8, 10)).square().mean().backward()
            ...     optimizer.step()
            ...     if step % 10 == 9:
            ...         optimizer.update_preconditioners()
        """
        self._raise_failures()
        try:
            plan = self._bound_plan()
            self._adopt_options(plan)
        except BaseException:
            self._withdraw()
            raise
        plan.core.update_preconditioners()
        self._raise_failures()

    def update_damping(self, loss_before: float | Tensor, loss_after: float | Tensor) -> float:
        r"""Adapts the damping of all groups by the rule of Levenberg and Marquardt.

        Let :math:`k` be the number of steps since the last call, or since the optimizer was made, loaded
        or copied. The last step has moved the layers by :math:`\delta = -\text{lr}\,\nu D`, where
        :math:`\nu` is the factor of the KL clip. In the quadratic model of K-FAC it lowers the loss by
        :math:`m = \sum (\text{lr}\,\nu - \text{lr}^2 \nu^2 / 2)\, V \cdot D`, summed over the layers. With
        :math:`\rho = (\text{loss\_before} - \text{loss\_after}) / m`

        - if :math:`\rho > 3/4`, damping is multiplied by :math:`0.95^k`;
        - if :math:`\rho < 1/4`, or ``loss_after`` is not finite, it is divided by :math:`0.95^k`.

        Inverses have the new damping when they are due. A step that predicts no reduction (skipped, or
        with :math:`\text{lr}\,\nu` 0 or above 2) changes nothing. The rule is that of Martens and Grosse 2015, section 6.5,
        whose learning rate is found by a line search; with a fixed ``lr`` of at most 1 and the batch of the
        step :math:`\rho` is near 1 where the model is good. Parameters without a layer lower the loss too,
        but are not in :math:`m`.

        With a ``process_group`` all ranks must call it; the losses are the means of those that the ranks give.

        Args:
            loss_before (float or Tensor): the loss whose gradient the last step used, including all of its
                penalties and that of ``weight_decay``. A tensor has one element. ``step(closure)`` returns
                the loss without that of ``weight_decay``.
            loss_after (float or Tensor): the same loss after the step, on the same batch.

        Returns:
            :math:`\rho`; ``-inf`` if ``loss_after`` is not finite, and NaN if no reduction was predicted.

        Raises:
            ValueError: ``adaptive_damping`` is off, ``damping`` is a function, a loss is not one number,
                ``loss_before`` is not finite, no step was taken since the last call, or ``lr`` differs
                between groups.

        .. note::
            Waits for the GPU, unlike ``step()``: call it every few steps.

        Example:
            >>> model, x = torch.nn.Linear(10, 2), torch.randn(8, 10)
            >>> optimizer = torchium.KFAC(model, lr=0.5, momentum=0, kl_clip=0.01, adaptive_damping=True)
            >>> for step in range(20):
            ...     loss = model(x).square().mean()
            ...     optimizer.zero_grad()
            ...     loss.backward()
            ...     optimizer.step()
            ...     if step % 5 == 4:
            ...         ratio = optimizer.update_damping(loss, model(x).square().mean())
        """
        return self._update_damping(loss_before, loss_after)

    def report(self) -> KFACReport:
        """What the last step of each parameter has done with it, and why.

        Returns:
            A dict, which ``print`` shows as a table. ``"parameters"``: for each name (or place, without a name) a treatment and a detail. The
            treatment is ``"factors"``; ``"diagonal"``, with a factor that is kept as its diagonal;
            ``"unit-wise"``, of a norm; ``"fallback"``, a step of SGD with momentum; or ``"none"``. The
            detail has the orders of the
            factors, or the reason for having none.

            ``"preconditioned"``, ``"fallback"``: names of the parameters of both kinds. A layer joins the
            first list with its first factors. ``"diagonal_A"``, ``"diagonal_G"``: names of the weights of
            which that factor, or :math:`K` or :math:`C`, is kept as its diagonal. ``"graph_bytes"``: the
            memory that captured steps keep.

        Example:
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
            >>> optimizer = torchium.KFAC(model)
            >>> model(torch.randn(8, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> optimizer.report()["parameters"]["0.weight"]
            ('factors', 'A 5, G 3')
            >>> optimizer.report()["parameters"]["1.weight"]
            ('unit-wise', '3 blocks 2 x 2')
        """
        return self._report()

    def _check_new_group(self, index: int, group: Group) -> None:
        super()._check_new_group(index, group)
        if group.get("adaptive_damping") and "damping" in schedules_in(self._OPTIONS, group):
            raise ValueError(
                f"damping of group {index} is a function of the step, which adaptive_damping=True cannot "
                "change; pass a number to start from, or adaptive_damping=False"
            )

    # ---- capture

    def _init_capture(self) -> None:
        self._capture = FactorCapture(self._wants, self._loss_scale, self._skip_layers)

    def _record_curvature(self, outputs: Tensor, *loss: Any) -> None:
        self._capture.record_curvature(outputs, *loss)

    def _wants(self) -> bool:
        """Whether the factors of a layer are due."""
        if not self._decided:
            self._capture.follow(self._decide())
        return bool(self._capture.due)

    def _unknown_loss_scale(self) -> Tensor | None:
        return self._loss_scale() if self.grad_scaler is None else None

    # ---- the step

    def _before_step(self, plan: JointPlan) -> None:
        self._capture.declare(plan)

    # ---- state

    def _ranks_of_state(self) -> str:
        return self._group_name

    def _is_partial(self) -> bool:
        if not self._group_name or self._grad_worker_fraction == 1:
            return False
        core = self._bound_plan().core
        return bool(core.has_parts() and (self._consolidates or core.lacks_inverses()))

    def _state_to_save(self) -> defaultdict[Tensor, Any]:
        plan = self._bound_plan()
        whole = defaultdict(dict, self.state)
        for param, state in zip(plan.params, plan.core.whole_states(), strict=True):
            if state:
                whole[param] = {**self.state[param], **state}
        return whole

    def _own_plan(self) -> JointPlan:
        is_new = self._plan is None
        plan = super()._own_plan()
        if is_new:
            plan.core.set_grad_worker_fraction(self._grad_worker_fraction)
        return plan

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_grad_worker_fraction": self._grad_worker_fraction,
            "_skip_layers": self._skip_layers,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._skip_layers = state.setdefault("_skip_layers", ())  # the capture needs it
        super().__setstate__(state)

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._capture.follow(None)


def checked_fraction(fraction: float, ekfac: bool) -> float:
    if not isinstance(fraction, (int, float)) or isinstance(fraction, bool):
        raise ValueError(f"grad_worker_fraction must be a number, got {fraction!r}")
    share = as_float(fraction)
    torch.ops.torchium.check_grad_workers(share, bool(ekfac))
    return share
