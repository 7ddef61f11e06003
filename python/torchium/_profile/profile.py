"""torchium.profile(): phases, their costs, and how far they are from what the device can do."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .limits import Limits, measure_limits
from .phase_cost import PhaseCost
from .roofline import check_matplotlib, draw_roofline
from .trace import OTHER, phase_costs


class Profile:
    """The result of :func:`profile`; ``print(profile)`` shows the table.

    Attributes:
        phases: after the block, one :class:`PhaseCost` per phase, the longest first.
        limits: of the device: ``bandwidth`` in bytes/s, ``flops`` per second.
        device: that was measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phases: tuple[PhaseCost, ...] = ()
        self.limits: Limits | None = None

    def __str__(self) -> str:
        if self.limits is None:
            return "torchium.profile: nothing was measured"
        total = sum(phase.seconds for phase in self.phases)
        head = ("phase", "calls", "ms", "%", "GB", "GFLOP", "counted %", "limit %", "bound")
        lines: list[tuple[str, ...]] = [head]
        for p in self.phases:
            known = [f"{1e-9 * p.bytes:.3g}", f"{1e-9 * p.flops:.3g}"] if p.bound else ["-", "-"]
            lines.append(
                (
                    p.name,
                    str(p.calls) if p.calls else "-",
                    f"{1e3 * p.seconds:.3f}",
                    f"{100 * p.seconds / total:.1f}" if total else "-",
                    *known,
                    f"{100 * p.counted:.0f}",
                    f"{100 * p.limit:.1f}" if p.bound else "-",
                    p.bound or "-",
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        rows = [
            "  ".join(
                cell.ljust(width) if i in (0, len(head) - 1) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        kind = "bfloat16" if self.device.type == "cuda" else "float32"
        limits = (
            f"{self.device}: copies {1e-9 * self.limits.bandwidth:.0f} GB/s, {kind} products "
            f"{1e-12 * self.limits.flops:.3g} TFLOP/s"
        )
        return "\n".join([*rows, limits])


@contextmanager
def profile(
    roofline: str | Path | None = None,
    *,
    device: torch.device | str | None = None,
    print_table: bool = True,
) -> Iterator[Profile]:
    """Measure the phases of the steps within a ``with`` block, and print a table of them.

    torch.profiler measures; phases are the ranges ``torchium::...`` of the optimizers and operators,
    and any ``torch.profiler.record_function("torchium::name")`` of your own. Bytes and flops are lower
    bounds: of the operands of operators and of matrix products, from the shapes that torch records, and
    of torchium's own kernels where they are known before the launch. ``counted`` says for which share
    of a phase's time there are any; nothing is estimated. After the block the limits of the device are
    measured: the rate of a copy, and of a matrix product (bfloat16 on a CUDA device, float32 on a
    CPU). A step that is replayed from a CUDA graph has no phases: measure with ``graphs=False``.

    Args:
        roofline: writes a PNG with the phases below the device's roofline; needs matplotlib.
        device: by default the current CUDA device if there is one, else the CPU.
        print_table: print the table at the end of the block.

    Yields:
        A :class:`Profile`, filled at the end of the block.

    Raises:
        ImportError: ``roofline`` is given and matplotlib is not installed; nothing is run.
        ValueError: the device is neither CUDA nor CPU, or there is no CUDA device; ``roofline`` is no path, or
            in no folder. Nothing is run.
        RuntimeError: another profiler of torch is running.

    Example:
        >>> with torchium.profile("roofline.png") as profile:
        ...     loss_of(model).backward()
        ...     optimizer.step()
    """
    chosen = _checked(device)
    if roofline is not None:
        _check_picture(roofline)
        check_matplotlib()
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        raise RuntimeError(
            "profile: another profiler of torch is running; leave its block, or that of the outer "
            "torchium.profile(), first"
        )
    result = Profile(chosen)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if chosen.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(chosen)
    with torch.profiler.profile(
        activities=activities, record_shapes=True, acc_events=True
    ) as recorded:
        yield result
        if chosen.type == "cuda":
            torch.cuda.synchronize(chosen)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    result.limits = measure_limits(chosen)
    result.phases = _phases(events, result.limits)
    if print_table:
        print(result)
    if roofline is not None:
        draw_roofline(result.phases, result.limits, str(chosen), Path(roofline))


def _check_picture(roofline: Any) -> None:
    if not isinstance(roofline, (str, os.PathLike)) or not Path(roofline).parent.is_dir():
        raise ValueError(
            f"profile: roofline is {roofline!r}; it must be a path in an existing folder"
        )


def _checked(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type not in ("cuda", "cpu"):
        raise ValueError(f"profile: device is {chosen}; it must be a CUDA device or the CPU")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"profile: device is {chosen}; there is no CUDA device")
    return chosen


def _phases(events: list[dict[str, Any]], limits: Limits) -> tuple[PhaseCost, ...]:
    found = []
    for name, cost in phase_costs(events).items():
        by_bytes, by_flops = cost.bytes / limits.bandwidth, cost.flops / limits.flops
        least = max(by_bytes, by_flops)
        bound = "" if least == 0 else "bandwidth" if by_bytes >= by_flops else "arithmetic"
        seconds = cost.seconds
        found.append(
            PhaseCost(
                name=name,
                calls=cost.calls,
                seconds=seconds,
                bytes=cost.bytes,
                flops=cost.flops,
                counted=cost.counted_seconds / seconds if seconds else 0.0,
                limit=least / seconds if seconds else 0.0,
                bound=bound,
            )
        )
    return tuple(sorted(found, key=lambda p: (p.name == OTHER, -p.seconds)))
