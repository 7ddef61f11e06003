"""The host's side of the status tensors that the step operators write (src/optim/core/step_status.h)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

# Skipped steps in a row after which the optimizer raises.
MAX_CONSECUTIVE_SKIPS = 3

Key = tuple[int, torch.device]  # parameter group, device
JOINT = -1  # instead of a group: all of them


def is_capturing() -> bool:
    """Whether the current CUDA stream records a graph: no event may be queried then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, reason: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured on the device of the parameters."""
    if device.type == "cuda" and is_capturing():
        raise RuntimeError(f"a CUDA graph cannot capture this call: {reason}")


@dataclass(frozen=True)
class Report:
    """What one step of the parameters of one group (or of all) on one device came to."""

    group: int
    params: list[Tensor]
    skipped: bool  # whether a gradient, not finite or too large, skipped this very step
    consecutive_skips: int
    non_finite: Tensor | None  # the first parameter with such a gradient
    root_failures: int  # the largest number of failures in a row of one matrix
    failed: Tensor | None  # the parameter of that matrix


@dataclass
class _Pending:
    key: Key
    params: list[Tensor]
    values: Tensor
    event: torch.cuda.Event | None


class StatusMonitor:
    """Status tensors, one a group and device, and the reports that come of them.

    On a GPU each status is copied to pinned memory behind the step and read when it has arrived,
    so the host never waits.
    """

    def __init__(self) -> None:
        self._statuses: dict[Key, Tensor] = {}
        self._last_params: dict[Key, list[Tensor]] = {}
        self._total_skips: dict[Key, int] = {}
        # The last count and index of each kind of failure, and the parameter that they mean.
        self._culprits: dict[
            tuple[int, torch.device, str], tuple[tuple[int, int], Tensor | None]
        ] = {}
        self._pending: deque[_Pending] = deque()
        self._pinned: list[Tensor] = []

    def status(self, key: Key) -> Tensor:
        """The tensor that the next step of ``key`` updates."""
        if key not in self._statuses:
            refuse_capture(key[1], "it is the first one; run a step before the capture")
            self._statuses[key] = torch.tensor([0, 0, -1, 0, -1], device=key[1])
        return self._statuses[key]

    def watch(self, key: Key, params: list[Tensor]) -> None:
        """Takes note that a step of ``params`` has been launched."""
        self._last_params[key] = params
        status = self._statuses[key]
        if not status.is_cuda:
            self._pending.append(_Pending(key, params, status, None))
        elif not is_capturing():
            values = (
                self._pinned.pop()
                if self._pinned
                else torch.empty_like(status, device="cpu", pin_memory=True)
            )
            values.copy_(status, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(status.device))
            self._pending.append(_Pending(key, params, values, event))

    def poll(self) -> list[Report]:
        """Reports of the steps known to be done, oldest first, without waiting."""
        if not self._pending or is_capturing():
            return []
        reports = []
        while self._pending:
            event = self._pending[0].event
            if event is not None and not event.query():
                break
            reports.append(self._take(self._pending.popleft()))
        return reports

    def wait(self) -> list[Report]:
        """Reports of all steps so far, those of replayed CUDA graphs included."""
        reports = []
        while self._pending:
            pending = self._pending.popleft()
            if pending.event is not None:
                pending.event.synchronize()
            reports.append(self._take(pending))
        for key, params in self._last_params.items():
            reports.append(self._report(key, params, self._statuses[key].tolist(), skipped=False))
        return reports

    def _take(self, pending: _Pending) -> Report:
        values = pending.values.tolist()
        if pending.event is not None:
            self._pinned.append(pending.values)
        skipped = values[1] > self._total_skips.get(pending.key, 0)
        self._total_skips[pending.key] = values[1]
        return self._report(pending.key, pending.params, values, skipped)

    def _report(self, key: Key, params: list[Tensor], values: list[int], skipped: bool) -> Report:
        consecutive_skips, total_skips, non_finite, root_failures, failed = values
        return Report(
            key[0],
            params,
            skipped,
            consecutive_skips,
            self._parameter((*key, "gradient"), (total_skips, non_finite), params),
            root_failures,
            self._parameter((*key, "root"), (root_failures, failed), params),
        )

    def _parameter(
        self, kind: tuple[int, torch.device, str], entry: tuple[int, int], params: list[Tensor]
    ) -> Tensor | None:
        """The parameter of a count and an index, which counts in the list of the call that wrote it."""
        known = self._culprits.get(kind)
        if known is None or known[0] != entry:
            index = entry[1]
            known = entry, params[index] if 0 <= index < len(params) else None
            self._culprits[kind] = known
        return known[1]
