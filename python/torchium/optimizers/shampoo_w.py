"""Shampoo with AdamW's signature."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ._blocked.adamw import ADAMW_OPTIONS, check_keywords, options_beside_adamw, shampoo_options
from .shampoo import Shampoo


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
