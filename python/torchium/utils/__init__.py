"""Utilities.

`cmake_prefix_path` lets CMake find the installed package, as `torch.utils.cmake_prefix_path` does
for torch:

    cmake -S . -B build -DCMAKE_PREFIX_PATH="$(python -c 'import torchium; print(torchium.utils.cmake_prefix_path)')"
"""

from pathlib import Path

import torchium_cpp

from . import cuda_kernels

cmake_prefix_path = str(Path(torchium_cpp.__file__).resolve().parent / "share" / "cmake")

__all__ = ["cmake_prefix_path", "cuda_kernels"]
