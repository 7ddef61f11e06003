"""AdaHessian."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import ParamsT

from ._blocked.base import BlockedOptimizer
from ._core.amp import ScaledLoss
from ._core.options import OptionList


class AdaHessian(ScaledLoss, BlockedOptimizer):
    r"""Adam with the diagonal of the Hessian in place of the gradient in the second moment.

    With :math:`g` the gradient, :math:`H` the Hessian of the loss and random signs :math:`z`, of which
    ``n_samples`` are averaged (Hutchinson's estimator),

    .. math::
        D &= \bigl|\tfrac1n \textstyle\sum z \odot H z\bigr| \\
        m &\leftarrow \beta_1 m + (1 - \beta_1)\, g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2)\, D^2 \\
        \theta &\leftarrow (1 - \text{lr}\;\text{weight\_decay})\,\theta
            - \text{lr}\,\frac{m / (1 - \beta_1^t)}{(v / (1 - \beta_2^t))^{k/2} + \text{eps}},

    where :math:`k` is ``hessian_power``. For a convolution :math:`D` is the mean over its kernel.

    The gradients need a graph: call ``loss.backward(create_graph=True)``. :meth:`step` differentiates them,
    one backward pass for all parameters and each random vector, and frees the graph. The gradients still
    refer to their parameters, of which PyTorch warns once (``Using backward() with create_graph=True will
    create a reference cycle``): call ``zero_grad()`` after each step, also after the last, else a model that is
    no longer used stays in memory. With that call the warning may be silenced:
    ``warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")``. Every
    operation of the model needs a second derivative. PyTorch has none for fused attention (put
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` around the model's call), for ``nn.EmbeddingBag``, and
    for models compiled by ``torch.compile``; ``DistributedDataParallel`` does not support ``create_graph=True``. A gradient without a
    graph, of a loss that is linear in its parameter or of a backward pass without ``create_graph=True``, has
    :math:`D = 0`, and where :math:`v` is 0 too its step is :math:`\text{lr}\, m / \text{eps}`. Layers within
    ``torch.utils.checkpoint`` with ``use_reentrant=True`` have such gradients. A warning counts those that
    are not zero, once; until then they are compared with 0, which waits for the device. The signs come
    from one seed of PyTorch's default generator on the CPU, and are the same on every device.

    State is float32 (float64 for float64 parameters), also under bfloat16 and float16 parameters. A
    gradient or diagonal that is not finite, or too large to square (as for :class:`Shampoo`), skips the
    whole step of its group; three in a row raise ``RuntimeError``. A caller cannot capture a step in a CUDA graph.

    Source: Yao, Gholami, Shen, Mustafa, Keutzer, Mahoney, "AdaHessian: An Adaptive Second Order Optimizer
    for Machine Learning", AAAI 2021, `arXiv:2006.00719 <https://arxiv.org/abs/2006.00719>`_.

    Args:
        params (iterable): parameters, named parameters or dicts of parameter groups; dense, real,
            float32, float64, bfloat16 or float16. Every option but ``grad_scaler`` may be set per group.
        lr (float or Tensor): learning rate, at least 0. A tensor has one element (default: 0.15).
        betas (tuple of float): decays :math:`\beta_1` and :math:`\beta_2`, in [0, 1)
            (default: (0.9, 0.999)).
        eps (float): added to the denominator, above 0 (default: 1e-4).
        weight_decay (float): decoupled weight decay, at least 0 (default: 0).
        hessian_power (float): :math:`k`, in [0, 1]; 0 is SGD with momentum (default: 1).
        update_each (int): steps between two estimates of the diagonal, at least 1 (default: 1).
        n_samples (int): random vectors for each estimate, at least 1 (default: 1).
        graphs (str or bool): on a GPU, what follows the estimate of the diagonal is captured in CUDA graphs
            after some steps, and replayed: the same results, bit for bit, with less work for the host.
            ``"auto"``: where the memory that the graphs keep is at most 5 % of the state or 1 % of the
            device's; ``"always"`` or True; ``"never"`` or False (default: "auto").
        grad_scaler (GradScaler, optional): scales the loss, under mixed precision. Needed only if its
            ``unscale_()`` is called before ``step()``. It may be set later as an attribute; a copy of the
            optimizer has none (default: None).

    Raises:
        ValueError: an option is out of its range, or a parameter is sparse, complex, integer,
            expanded, a ``DTensor`` or a flat shard of ``FullyShardedDataParallel``. :meth:`step` raises it,
            and changes no parameter, if no gradient has a graph.

    Example:
        >>> model = torch.nn.Linear(10, 2)
        >>> optimizer = torchium.AdaHessian(model.parameters())
        >>> loss = model(torch.randn(8, 10)).square().mean()
        >>> loss.backward(create_graph=True)
        >>> optimizer.step()
        >>> optimizer.zero_grad()  # after the last step too
    """

    _OPTIONS = OptionList("AdaHessian")
    _OWN_OPTION = "hessian_power"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.15,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        hessian_power: float = 1.0,
        update_each: int = 1,
        n_samples: int = 1,
        *,
        graphs: str | bool = "auto",
        grad_scaler: GradScaler | None = None,
    ) -> None:
        self.grad_scaler = grad_scaler
        super().__init__(params, self._OPTIONS.given(locals()))

    def _step_groups(self) -> None:
        if self._has_lost_scale():
            raise ValueError(
                "AdaHessian does not know the loss scale after unscale_(), and the graph of the gradients "
                "is still scaled; pass grad_scaler=scaler, or set the attribute grad_scaler"
            )
        self._plans.set_loss_scale(self._loss_scale())
        super()._step_groups()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_grad_scaler"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.grad_scaler = None  # a copied scaler would not be updated
        super().__setstate__(state)
