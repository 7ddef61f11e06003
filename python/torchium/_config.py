"""Build information."""

import torch


def show_config() -> str:
    """Describes this build, one 'name: value' a line.

    Names the versions of torchium and torch (built against and running), CUDA and its
    architectures, BLAS and LAPACK of torch, the compiler and the build type.
    """
    description: str = torch.ops.torchium.show_config()
    return description
