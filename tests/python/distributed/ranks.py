"""Cases that the processes of a group run together: with gloo on the CPU, or with NCCL, a GPU for each."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

SECONDS = 120  # that a case may take
# Imported once, in the process from which those of all groups are forked.
IMPORTS = [
    "torchium",
    "torch._dynamo",  # by the first step of an optimizer, in 1.2 s
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
CASES: dict[tuple[str, str], tuple[int, ...]] = {}
GPUS_OF_CASES: dict[tuple[str, str], int] = {}
WITHOUT_CUDA: set[tuple[str, str]] = set()
Case = Callable[[int], None]
_folders: list[Path] = []
_devices = [torch.device("cpu")]  # the last: of the group that this process is in


def case(*ranks: int, cuda: bool = True, gpus: int = 2) -> Callable[[Case], Case]:
    """The function runs in groups of these sizes, in all processes of one at the same time.

    cuda: if its module runs on GPUs too, with all tensors on device(), so does the case.
    gpus: of these, at least so many.
    """

    def register(function: Case) -> Case:
        key = function.__module__, function.__name__
        CASES[key] = ranks
        GPUS_OF_CASES[key] = gpus
        if not cuda:
            WITHOUT_CUDA.add(key)
        return function

    return register


def listed(ranks: list[int]) -> str:
    """As messages name them: ``"rank 1"``, ``"ranks 0, 1 and 2"``."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def device() -> torch.device:
    """Of this process."""
    return _devices[-1]


def shared_folder() -> Path:
    """Of the group of this process."""
    return _folders[-1]


class Ranks:
    """A group of processes that runs one case after another.

    After a failure, whether in one process or in all, the next case runs in a new group.
    """

    def __init__(
        self, ranks: int, folder: Path, device_type: str = "cpu", by_tcp: bool | None = None
    ) -> None:
        self.ranks, self.folder, self.starts = ranks, folder, 0
        self.device_type = device_type
        # Hosts exchange numbers through a TCP store, like torchrun's, but not through files.
        self.by_tcp = ranks == 3 or device_type == "cuda" if by_tcp is None else by_tcp
        self.members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        self.starts += 1
        port = 0
        if self.by_tcp:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self.store.port
        file = str(self.folder / f"store{self.starts}")
        # MKL's products then do not depend on the alignment of a matrix, which differs in another batch.
        with mock.patch.dict(os.environ, {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}):
            for rank in range(self.ranks):
                own, calls = context.Pipe()
                arguments = (rank, self.ranks, self.device_type, self.folder, file, port, calls)
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                calls.close()
                self.members.append((process, own))

    def check(self, module: str, name: str) -> None:
        """Runs a case, and fails with the tracebacks of all ranks on which it fails."""
        if not self.members:
            self.start()
        deadline = time.monotonic() + SECONDS
        self.send((module, name))
        texts = [answer(*member, deadline) for member in self.members]
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if failures:
            self.kill()
        assert not failures, "\n".join(failures)

    def send(self, message: tuple[str, str] | None) -> None:
        for _, calls in self.members:
            with suppress(BrokenPipeError):  # a process that has ended has no answer either
                calls.send(message)

    def stop(self) -> None:
        """The processes end by themselves, without an error."""
        self.send(None)
        for process, _ in self.members:
            process.join(SECONDS)
        codes = [process.exitcode for process, _ in self.members]
        self.kill()
        assert all(code == 0 for code in codes), codes

    def kill(self) -> None:
        for process, calls in self.members:
            process.kill()
            process.join()
            calls.close()
        self.members.clear()


def answer(process: multiprocessing.process.BaseProcess, calls: Connection, deadline: float) -> str:
    """The traceback of a case in a process, empty if it has passed."""
    try:
        if calls.poll(max(0.0, deadline - time.monotonic())):
            return str(calls.recv())
    except EOFError:
        process.join()
        return f"the process has ended with exit code {process.exitcode}"
    return f"no answer within {SECONDS} s"


def serve(
    rank: int, ranks: int, device_type: str, folder: Path, file: str, port: int, calls: Connection
) -> None:
    """In one process of a group: runs the cases that it receives, up to the first that fails."""
    os.environ.update(environment(rank, ranks))
    torch.set_num_threads(1)
    _folders.append(folder)
    try:
        _devices.append(torch.device(device_type, rank if device_type == "cuda" else None))
        if device_type == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=dist.TCPStore("127.0.0.1", port) if port else dist.FileStore(file, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=SECONDS / 4),
        )
        while (called := calls.recv()) is not None:
            module, name = called
            torch.manual_seed(0)
            getattr(importlib.import_module(module), name)(ranks)
            calls.send("")
        if dist.is_initialized():  # Lightning destroys the group itself
            dist.destroy_process_group()
    except BaseException:
        calls.send(traceback.format_exc())


def environment(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "cases",
    }
