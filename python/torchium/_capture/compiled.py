"""Compiled code, which does not look for hooks that came after it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import CodeType
from typing import Any

import torch

_lock = threading.RLock()  # a garbage collection may end a block within it
_blocks = 0  # of run_uncompiled(), in all threads
_stance: Any = None  # ``torch.compiler.set_stance`` of the first of them


def forget_compiled() -> None:
    """Makes all compiled code compile again, with the hooks that exist then."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset_code_caches()


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Within it code runs as if it had not been compiled; afterwards it need not be compiled again.

    ``torch.cond`` and its like compile themselves, and do not run uncompiled. Where nothing else has been
    compiled, all is compiled again instead.
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
    if all("_higher_order_ops" in code.co_filename for code in _compiled()):
        forget_compiled()
        return
    try:
        _stance = torch.compiler.set_stance("force_eager")
    except RuntimeError:  # inside of a compiled region
        forget_compiled()


def _compiled() -> list[CodeType]:
    """What has been compiled."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return []
    found = (code() for code in dynamo.convert_frame.input_codes.seen)
    return [code for code in found if code is not None]


def _end() -> None:
    """Makes our stance equal to the one before, because others may have kept it to set it again."""
    global _stance
    if _stance is not None:
        for field in fields(_stance.stance):
            setattr(_stance.stance, field.name, getattr(_stance.prev, field.name))
        _stance = None
