"""Optimizers: :class:`torch.optim.Optimizer` subclasses over the compiled core."""

from .adagrad import Adagrad
from .kfac import KFAC
from .shampoo import Shampoo

__all__ = ["KFAC", "Adagrad", "Shampoo"]
