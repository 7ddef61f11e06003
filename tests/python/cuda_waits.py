"""Whether the host waits for a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[torch.cuda.Event]:
    """Raises where the body waits for the device, which does nothing for about 0.15 s at first.

    The event is the end of that time.
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
