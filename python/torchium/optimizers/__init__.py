"""Optimizers: :class:`torch.optim.Optimizer` subclasses over the compiled core."""

from torchium.optimizers.adagrad import Adagrad
from torchium.optimizers.shampoo import Shampoo

__all__ = ["Adagrad", "Shampoo"]
