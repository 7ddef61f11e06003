"""The group of the ranks of a benchmark."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist


def start_ranks(function: Callable[..., None], arguments: tuple, ranks: int, on_gpu: bool) -> None:
    """Calls the function with its rank and the arguments in each process. On a CPU they share what is imported."""
    torch.multiprocessing.start_processes(
        function, arguments, nprocs=ranks, start_method="spawn" if on_gpu else "fork"
    )


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


def device_of_rank(rank: int, on_gpu: bool) -> torch.device:
    """From now on the current one."""
    if not on_gpu:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def join_group(rank: int, ranks: int, port: int, on_gpu: bool) -> torch.device:
    """The device of this rank, in the default group of all, with a store like torchrun's."""
    device = device_of_rank(rank, on_gpu)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        device_id=device if on_gpu else None,
    )
    return device
