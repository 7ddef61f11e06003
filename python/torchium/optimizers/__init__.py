"""Optimizers: :class:`torch.optim.Optimizer` subclasses over the compiled core."""

from .adagrad import Adagrad
from .shampoo import Shampoo

__all__ = ["Adagrad", "Shampoo"]
