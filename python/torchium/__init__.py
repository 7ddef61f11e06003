"""Second-order optimizers for PyTorch over a compiled C++ and CUDA core."""

from torchium_cpp import __version__

from ._config import show_config

__all__ = [
    "__version__",
    "show_config",
]
