"""C++ objects of Torchium that are not operators on tensors."""

from . import optim as optim

def version() -> str:
    """The version of libtorchium."""

def built_with_cuda() -> bool:
    """True if the CUDA kernels of Torchium are in this build."""

def show_config() -> str:
    """Lines of 'name: value': versions, CUDA, BLAS, compiler and build type."""
