"""Where warnings point to."""

from __future__ import annotations

import sys
import warnings

import torch

_LIBRARIES = ("torch", "torchium")


def users_stacklevel() -> int:
    """The ``stacklevel`` with which a warning of the caller shows the user's line, such as ``optimizer.step()``."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=users_stacklevel())


# The core calls it as an operator, because it is not linked with Python.
_library = torch.library.Library("torchium", "IMPL")
_library.impl("warn", _warn, "CompositeExplicitAutograd")
