"""Optimizers: :class:`torch.optim.Optimizer` subclasses over the compiled core."""

from .adagrad import Adagrad
from .kfac import KFAC
from .natural_gradient import NaturalGradient
from .shampoo import Shampoo

__all__ = ["KFAC", "Adagrad", "NaturalGradient", "Shampoo"]
