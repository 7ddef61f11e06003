"""Compiled code, which does not look for hooks that came after it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_lock = threading.Lock()
_blocks = 0  # of run_uncompiled(), in all threads
_stance: AbstractContextManager[None] | None = None  # of the first of them


def forget_compiled() -> None:
    """Lets all compiled code be compiled anew, with the hooks that exist then."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset_code_caches()


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Within it code runs as if it had not been compiled; afterwards it need not be compiled anew.

    Inside of a compiled region, where PyTorch does not allow that, all is compiled anew instead.
    """
    global _blocks
    with _lock:
        if _blocks == 0:
            _begin()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                _end()


def _begin() -> None:
    global _stance
    if "torch._dynamo" not in sys.modules:
        return
    try:
        _stance = torch.compiler.set_stance("force_eager")
    except RuntimeError:
        forget_compiled()


def _end() -> None:
    global _stance
    if _stance is not None:
        _stance.__exit__(None, None, None)
        _stance = None
