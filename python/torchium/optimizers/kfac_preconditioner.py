"""K-FAC in front of another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ._core.amp import found_non_finite, has_unscaled
from ._core.capturing import CapturingOptimizer, ParamsOrModel
from ._core.factors import checked_skip_layers
from ._core.keywords import unexpected_keyword
from ._core.options import OptionList
from .kfac import KFAC, checked_fraction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What to do about the keywords of kfac-pytorch, KFAC and the optimizer behind that this class lacks.
_REMEDIES = {
    "compute_method": 'use damping_split="exact" for EIGEN, "plain" or "pi" for INVERSE',
    "accumulation_steps": "leave it out, and divide the loss of each micro-batch by their number",
    "inv_dtype": "leave it out: inverses are float32 (float64 for float64 parameters)",
    "assignment_strategy": 'leave it out: layers are assigned as by "compute"',
    "colocate_factors": "leave it out: both factors of a layer belong to one rank",
    "allreduce_bucket_cap_mb": "leave it out: buckets have 32 MiB",
    "symmetry_aware": "leave it out: factors are sent as triangles",
    "compute_eigenvalue_outer_product": "leave it out: it does not change results",
    "update_factors_in_hook": "leave it out: it does not change results",
    "loglevel": "leave it out: warnings come from Python's warnings",
    "TCov": "use factor_update_steps",
    "TInv": "use inv_update_steps",
    "stat_decay": "use factor_decay",
    **dict.fromkeys(
        ("momentum", "weight_decay", "maximize"), "give it to the optimizer that takes the step"
    ),
}


class KFACPreconditioner(KFAC):
    r""":class:`KFAC` without its update, in front of any optimizer of ``torch.optim``.

    ``step()`` replaces the gradients of the layers by the direction of K-FAC, in this order, with
    :math:`V` the gradient of weight and bias:

    1. :math:`D = (G + \sqrt{\text{damping}}/\pi\,I)^{-1}\, V\, (A + \pi \sqrt{\text{damping}}\,I)^{-1}`,
       or with ``damping_split="exact"`` :math:`(A \otimes G + \text{damping}\,I)^{-1} V`;
    2. ``.grad`` :math:`\leftarrow \min(1, \sqrt{\text{kl\_clip} / |\sum \text{lr}^2\, V \cdot D|})\, D`.

    Parameters do not move, and the gradients of parameters without a layer stay as they are. Then the
    other optimizer takes its step. With ``torch.optim.SGD`` of the same ``lr`` and momentum, and no weight
    decay, the parameters are those of :class:`KFAC` up to rounding.

    - Weight decay of the other optimizer comes after the preconditioner. SGD's L2 penalty is then a plain
      ``weight_decay * p``, which :class:`KFAC` would precondition, and which the KL clip does not see.
    - The KL clip bounds a step of length ``lr`` along the direction. After Adam and other optimizers that
      rescale it, the step has another length; ``kl_clip=None`` turns the clip off.
    - ``lr=lambda step: optimizer.param_groups[0]["lr"]`` follows a schedule of the other optimizer. The
      function is called in every ``step()``. A group may have its own.
    - Clip gradients before ``step()``, as for :class:`KFAC`.
    - With a ``GradScaler``, pass it as ``grad_scaler``, and call ``scaler.unscale_(optimizer)`` before
      ``step()`` and ``scaler.step(optimizer)`` after it. The factors are divided by the scale of
      ``grad_scaler``, the gradients by ``unscale_()``. Without ``grad_scaler`` the factors contain the
      scale, and the directions are wrong without an error. A step with gradients that are not finite is
      skipped here and by the scaler.

    Layers, capture, factors, checkpoints and errors are those of :class:`KFAC`. So is :meth:`report`, in
    which ``"fallback"`` means that the gradient stays as it is. A skipped step leaves all gradients as
    they are, also those that are not finite. Every ``step()`` forgets what was captured, and so does
    ``zero_grad()`` of either optimizer.

    The first six options may be functions of the step number, as those of :class:`KFAC`. (kfac-pytorch
    counts from 0.)

    The first six names are those of kfac-pytorch (`github.com/gpauloski/kfac-pytorch
    <https://github.com/gpauloski/kfac-pytorch>`_); ``docs/migration.md`` compares the rest, and the unit of
    ``damping``.

    Args:
        params_or_model (nn.Module or iterable): as for :class:`KFAC`. Every option but ``batch_averaged``,
            ``kl_clip``, ``damping_split``, ``ekfac``, ``solver`` and ``fisher`` may be set for a group.
        factor_update_steps (int or callable): steps between two updates of the factors; ``TCov`` of :class:`KFAC`
            (default: 5).
        inv_update_steps (int or callable): steps between two inversions of the factors; ``TInv`` of :class:`KFAC`
            (default: 10).
        damping (float or callable): added to the Fisher matrix, at least 0 (default: 0.01).
        factor_decay (float or callable): decay of the averages of the factors, in [0, 1]; ``stat_decay`` of
            :class:`KFAC` (default: 0.95).
        kl_clip (float or callable, optional): bound of the step in the metric of the Fisher matrix, above 0.
            None: no bound (default: 1e-3).
        lr (float, Tensor or callable): learning rate of the other optimizer, at least 0. Only the KL clip depends on
            it (default: 0.1).
        batch_averaged (bool): as for :class:`KFAC`, and all below too (default: True).
        eps (float): default: 1e-8.
        damping_split (str): default: "pi".
        ekfac (bool): default: False.
        solver (str): default: "auto".
        structures (tuple of str): default: ("dense", "dense").
        block_size (int): default: 32.
        alpha1 (float): default: 0.5.
        fisher (str): with :meth:`update_curvature` for "mc" and "ggn" (default: "empirical").
        weight_sharing (str): default: "expand".
        max_factor_size (int): default: 5000.
        factor_dtype (torch.dtype, optional): default: None.
        grad_scaler (GradScaler, optional): the scaler of the loss, under mixed precision. Required whenever
            one is used (default: None).
        process_group (ProcessGroup, optional): as for :class:`KFAC` (default: None).
        grad_worker_fraction (float): as for :class:`KFAC` (default: 1.0).
        skip_layers (list): as for :class:`KFAC`, and as that of kfac-pytorch: their gradients stay as they are
            (default: none).

    Raises:
        TypeError: an unknown keyword; for those of kfac-pytorch the message has what to use instead.
        ValueError: as for :class:`KFAC`; and from ``step()``, if a ``GradScaler`` calls it, or if
            ``grad_scaler`` has not unscaled the gradients of another optimizer.

    Example:
        >>> model = torch.nn.Linear(10, 2)
        >>> preconditioner = torchium.KFACPreconditioner(model, lr=0.1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.randn(8, 10)).square().mean().backward()
        >>> preconditioner.step()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    _OPTIONS = OptionList("KFACPreconditioner")
    _OWN_OPTION = "factor_update_steps"
    _takes_steps = False

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        *,
        factor_update_steps: int | Callable[[int], int] = 5,
        inv_update_steps: int | Callable[[int], int] = 10,
        damping: float | Callable[[int], float] = 0.01,
        factor_decay: float | Callable[[int], float] = 0.95,
        kl_clip: float | Callable[[int], float | None] | None = 1e-3,
        lr: float | Tensor | Callable[[int], float | Tensor] = 0.1,
        batch_averaged: bool = True,
        eps: float = 1e-8,
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
        grad_scaler: GradScaler | None = None,
        process_group: ProcessGroup | None = None,
        grad_worker_fraction: float = 1.0,
        skip_layers: Iterable[str | type[nn.Module]] = (),
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise unexpected_keyword(
                type(self).__name__, name, self._OPTIONS.names, _REMEDIES.get(name, "")
            )
        options = self._OPTIONS.given(locals())
        self._skip_layers = checked_skip_layers(skip_layers)
        self._grad_worker_fraction = checked_fraction(grad_worker_fraction, ekfac)
        CapturingOptimizer.__init__(self, params_or_model, options, grad_scaler, process_group)

    def _refuse_misuse(self) -> None:
        if hasattr(self, "found_inf"):
            raise ValueError(
                "a GradScaler has called step() of this KFACPreconditioner; call step() itself, after "
                "scaler.unscale_(optimizer) and before scaler.step(optimizer), and pass the scaler as "
                "grad_scaler"
            )
        scaler = self.grad_scaler
        if scaler is not None and scaler.is_enabled() and not has_unscaled(scaler, self):
            raise ValueError(
                "the gradients still have the scale of grad_scaler; call scaler.unscale_(optimizer), with "
                "the optimizer that takes the step, before step() of this KFACPreconditioner"
            )
        super()._refuse_misuse()

    @contextmanager
    def _unscaled_gradients(self) -> Iterator[Tensor | None]:
        """The gradients as they are; yields whether the scaler will skip the step."""
        scaler = self.grad_scaler
        yield None if scaler is None or not scaler.is_enabled() else found_non_finite(self)
