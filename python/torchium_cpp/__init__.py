"""The compiled part of Torchium: loads libtorchium, whose operators appear as torch.ops.torchium.

The module `_C` (the C++ optimizer classes, build information) is imported only when it is asked
for. It fits one version of Python; libtorchium fits all of them.
"""

import importlib
from pathlib import Path
from types import ModuleType

import torch

from ._build_info import TORCH_VERSION, VERSION

__version__ = VERSION


def _check_torch_version(running: str, built: str) -> None:
    """Raises ImportError unless `running` has the major and minor version of `built`.

    The C++ interface of torch changes with each minor version, so that a library built against
    another one fails with missing symbols or, worse, with wrong offsets.
    """
    if running.split("+")[0].split(".")[:2] != built.split(".")[:2]:
        raise ImportError(
            f"torchium {__version__} was built against torch {built}, but torch {running} is "
            "installed. Build torchium again for this torch: "
            "pip install --no-build-isolation --force-reinstall --no-deps . in its sources "
            f"(or make install PYTHON=path/to/python); or install torch=={built}."
        )


def _load_library() -> None:
    torch.ops.load_library(Path(__file__).with_name("libtorchium.so"))


def __getattr__(name: str) -> ModuleType:
    if name == "_C":
        return importlib.import_module("torchium_cpp._C")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_check_torch_version(torch.__version__, TORCH_VERSION)
_load_library()
