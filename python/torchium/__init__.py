"""Second-order optimizers for PyTorch over a compiled C++ and CUDA core."""

from torchium_cpp import __version__

from . import compat, gradients, linalg, optimizers, utils
from ._capture.registry import create_optimizer, get_available_optimizers
from ._config import show_config
from ._memory import MemoryInfo, WorkspaceUse, memory_info, set_workspace_limit, workspace_report
from ._per_sample.backward import per_sample
from ._per_sample.per_sample import per_sample_gradients
from ._profile.phase_cost import PhaseCost
from ._profile.profile import Profile, profile
from .optimizers import (
    KFAC,
    Adagrad,
    AdaHessian,
    KFACPreconditioner,
    NaturalGradient,
    Shampoo,
    ShampooW,
)

__all__ = [
    "KFAC",
    "AdaHessian",
    "Adagrad",
    "KFACPreconditioner",
    "MemoryInfo",
    "NaturalGradient",
    "PhaseCost",
    "Profile",
    "Shampoo",
    "ShampooW",
    "WorkspaceUse",
    "__version__",
    "compat",
    "create_optimizer",
    "get_available_optimizers",
    "gradients",
    "linalg",
    "memory_info",
    "optimizers",
    "per_sample",
    "per_sample_gradients",
    "profile",
    "set_workspace_limit",
    "show_config",
    "utils",
    "workspace_report",
]
