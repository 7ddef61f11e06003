"""Checks that the host does not wait for a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[torch.cuda.Event]:
    """Raise if the body waits for the device, which first sleeps for about 0.15 s.

    The event marks the end of the sleep.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 28)
    asleep = torch.cuda.Event()
    asleep.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield asleep
    finally:
        torch.cuda.set_sync_debug_mode("default")
