"""Adagrad."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._blocked.base import BlockedOptimizer
from ._core.options import OptionList


class Adagrad(BlockedOptimizer):
    r"""Divides the gradient by the root of the sum of its squares: by entries or by full matrices.

    At the parameter's step :math:`t`, with :math:`g` the gradient (plus
    :math:`\text{weight\_decay}\,\theta`) and
    :math:`\gamma = \text{lr} / (1 + (t - 1)\,\text{lr\_decay})`:

    - by default :math:`s \leftarrow s + g^2` and
      :math:`\theta \leftarrow \theta - \gamma\,g / (\sqrt{s} + \text{eps})`, bit for bit the result of
      :class:`torch.optim.Adagrad` on finite dense gradients. Its state dict can be loaded;
    - with ``full_matrix`` the flattened parameter is cut into blocks of ``block_size`` entries, each
      with a matrix :math:`G \leftarrow G + g g^\top`, and
      :math:`\theta \leftarrow \theta - \gamma\,(G + \text{eps}\,I)^{-1/2} g`. Roots are due at
      every multiple of ``update_freq`` and, while these are closer together, at steps 1 to 8, 10, 12,
      14, 16, 20, ...: four per power of two.

    State is float32 (float64 for float64 parameters), also under bfloat16 and float16 parameters. A
    gradient that is not finite, or too large to square (as for :class:`Shampoo`), skips the whole
    step of its group. A root that is not finite or not accurate is never used: the matrix keeps its
    last good root, and three failures in a row raise ``RuntimeError``.

    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", `JMLR 12, 2011 <https://jmlr.org/papers/v12/duchi11a.html>`_.

    Args:
        params (iterable): parameters, named parameters or dicts of parameter groups; dense, real,
            float32, float64, bfloat16 or float16. Every option below may be set per group.
        lr (float or Tensor): learning rate, at least 0. A tensor has one element (default: 0.01).
        lr_decay (float): decay of the learning rate (default: 0).
        weight_decay (float): L2 penalty (default: 0).
        initial_accumulator_value (float): initial :math:`s`, or initial :math:`G` as a multiple of the
            identity (default: 0).
        eps (float): added to the denominator, or to :math:`G` (default: 1e-10). With ``full_matrix``
            and ``update_freq`` above 1 a larger value is needed: the part of a gradient outside the
            span of the gradients in the last root is divided by :math:`\sqrt{\text{eps}}`.
        full_matrix (bool): block full-matrix form (default: False). Its state is ``2 block_size``
            times the parameter: put embeddings and other large parameters in a group without it.
        block_size (int): entries of a block of the full-matrix form (default: 128).
        update_freq (int): steps between two computations of the roots of the full-matrix form
            (default: 1).
        root_method (str): ``"eigh"``, ``"newton"`` or ``"auto"`` for the roots of the full-matrix
            form; see :func:`torchium.linalg.matrix_inverse_root`. The sums have low rank at first and
            almost no damping, for which eigenvectors are most robust (default: "eigh").
        maximize (bool): go up instead of down (default: False).
        graphs (str or bool): steps on a GPU are captured in CUDA graphs after some steps, and
            replayed: the same results, bit for bit, with far less work for the host. ``"auto"``:
            where the memory that the graphs keep is at most 5 % of the state or 1 % of the device's;
            ``"always"`` or True; ``"never"`` or False. Steps with roots by eigenvalues are launched.
            Steps that a caller captures are not affected (default: "auto").

    Raises:
        ValueError: an option is out of its range, or a parameter is sparse, complex, integer,
            expanded, a ``DTensor`` or a flat shard of ``FullyShardedDataParallel``.

    Example:
        >>> model = torch.nn.Linear(10, 2)
        >>> optimizer = torchium.Adagrad(model.parameters(), lr=0.1, full_matrix=True)
        >>> loss = model(torch.randn(8, 10)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    _OPTIONS = OptionList("Adagrad")
    _OWN_OPTION = "initial_accumulator_value"  # of torch.optim.Adagrad too

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        full_matrix: bool = False,
        block_size: int = 128,
        update_freq: int = 1,
        root_method: str = "eigh",
        maximize: bool = False,
        graphs: str | bool = "auto",
    ) -> None:
        super().__init__(params, self._OPTIONS.given(locals()))
