"""Optimizers: :class:`torch.optim.Optimizer` subclasses over the compiled core."""

from ._blocked.report import ParameterReport as ParameterReport
from ._blocked.report import ShampooReport as ShampooReport
from ._core.memory import GroupMemory as GroupMemory
from ._core.memory import MemoryReport as MemoryReport
from ._core.memory import ParameterMemory as ParameterMemory
from ._core.memory import StateMemory as StateMemory
from .adagrad import Adagrad
from .adahessian import AdaHessian
from .kfac import KFAC
from .kfac import KFACReport as KFACReport
from .kfac_preconditioner import KFACPreconditioner
from .natural_gradient import NaturalGradient
from .natural_gradient import NaturalGradientReport as NaturalGradientReport
from .shampoo import Shampoo, ShampooW

__all__ = [
    "KFAC",
    "AdaHessian",
    "Adagrad",
    "KFACPreconditioner",
    "NaturalGradient",
    "Shampoo",
    "ShampooW",
]
