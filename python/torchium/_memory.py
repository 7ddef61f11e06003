"""Memory of devices and of torchium."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ops = torch.ops.torchium


@dataclass(frozen=True)
class MemoryInfo:
    """The memory of a device, in bytes. A CPU has no allocated and cached memory of its own: zero.

    Attributes:
        device: whose memory it is.
        total: of the device, or of the machine.
        available: for allocation: the driver's free memory and the unused memory of torch's
            allocator, or what the machine or the process's control group has left.
        allocated: in live tensors of this process.
        cached: reserved by torch's allocator, live tensors included.
        arena: held by ``efficient_tensor_creation``, live tensors included.
        arena_in_use: of that, in live tensors.
        workspace_limit: of :func:`set_workspace_limit`; None: none.
    """

    device: torch.device
    total: int
    available: int
    allocated: int
    cached: int
    arena: int
    arena_in_use: int
    workspace_limit: int | None


@dataclass(frozen=True)
class WorkspaceUse:
    """What one owner holds between calls, in bytes.

    Attributes:
        owner: an optimizer, such as ``"Shampoo"``, once for each parameter group and device; or
            ``"Arena"``.
        device: where it is.
        parameters: number of parameter tensors.
        state_bytes: of the optimizer's state on this device.
        scratch_bytes: of workspace and captured steps (``memory_report()``), or of the arena.
    """

    owner: str
    device: torch.device
    parameters: int
    state_bytes: int
    scratch_bytes: int


def as_device(function: str, device: torch.device | str | int) -> torch.device:
    """The device; an integer is the index of a CUDA device."""
    try:
        # torch.device(int) means the accelerator, and raises without one.
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{function}: device is {device!r}; it must be a CUDA device or the CPU"
        ) from error


def memory_info(device: torch.device | str | int | None = None) -> MemoryInfo:
    """Return the memory of a device.

    Args:
        device: by default the current CUDA device if there is one, else the CPU; an integer is the
            index of a CUDA device.

    Raises:
        ValueError: the device does not exist, or is neither CUDA nor CPU.
    """
    if device is None:
        chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        chosen = as_device("memory_info", device)
    if chosen.type == "cuda" and chosen.index is None and torch.cuda.is_available():
        chosen = torch.device("cuda", torch.cuda.current_device())
    total, available, allocated, cached, arena, in_use, limit = _ops.memory_info(chosen)
    return MemoryInfo(
        chosen, total, available, allocated, cached, arena, in_use, None if limit < 0 else limit
    )


def workspace_report() -> tuple[WorkspaceUse, ...]:
    """Return what each optimizer and the arena hold, the largest first.

    An optimizer is listed from its first step on, in both languages. Scratch that kernels need for
    one call does not count: it returns to torch's allocator. Call it between steps: a step on another
    thread may change what it counts.
    """
    return tuple(
        WorkspaceUse(owner, torch.device(device), *counts)
        for owner, device, *counts in zip(*_ops.workspace_report(), strict=True)
    )


def set_workspace_limit(bytes: int | None) -> None:
    """Bound three kinds of scratch memory, for the whole process.

    These are the default ``max_workspace_bytes`` of :func:`torchium.linalg.chunked_matmul`; the fp16
    copy of a large matrix by which :func:`torchium.linalg.hutchinson_trace` and
    :func:`torchium.linalg.hutchinson_diagonal` multiply on Hopper (without it they multiply in
    float32); and what the arena of ``efficient_tensor_creation`` keeps on a device. Nothing else:
    other functions and the optimizers take the scratch that they need, and their state is not
    limited.

    Args:
        bytes: None, as at first: no limit.

    Raises:
        ValueError: not an integer, or negative.
    """
    is_integer = isinstance(bytes, int) and not isinstance(bytes, bool) and bytes < 2**63
    if bytes is not None and not is_integer:
        raise ValueError(
            f"set_workspace_limit: bytes is {bytes!r} ({type(bytes).__name__}); it must be an "
            "integer below 2**63, or None for no limit"
        )
    _ops.set_workspace_limit(bytes)
