"""Parameters, optimizers and comparisons for processes that share the steps of Shampoo.

``CASES[name](ranks)`` runs on all ranks of a group at the same time.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

torch.set_num_threads(1)

SHAPES = [(40, 24), (16, 16), (24,), (33, 17), (), (8, 3, 3, 3), (50, 7), (0, 3), (5, 3, 4), (70,)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all_buffers": {
        "betas": (0.9, 0.99),
        "grafting": "adam",
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
        "momentum": 0.9,
    },
    "penalty": {
        "weight_decay": 0.1,
        "maximize": True,
        "preconditioner_1d": "full",
        "grafting": "sgd",
    },
    "unpreconditioned": {
        "max_preconditioned_dim": 30,
        "grafting": "rmsprop",
        "momentum": 0.5,
        "nesterov": True,
        "start_preconditioning_step": 3,
    },
    "diagonal": {"max_preconditioned_dim": 30, "grafting": "sgd", "betas": (0.5, 0.9)},
}
CASES: dict[str, Callable[[int], None]] = {}


def case(function: Callable[[int], None]) -> Callable[[int], None]:
    CASES[function.__name__] = function
    return function


def cases_in(*modules: str) -> list[str]:
    return [name for name, function in CASES.items() if function.__module__ in modules]


def run_cases(rank: int, ranks: int, folder: str, names: list[str]) -> None:
    """In one process of a group; writes the traceback of each case that fails."""
    os.environ["SHARED_STEPS_FOLDER"] = folder
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=20),
    )
    for name in names:
        failure = ""
        try:
            CASES[name](ranks)
        except BaseException:
            failure = traceback.format_exc()
        Path(folder, f"{ranks}.{name}.{rank}").write_text(failure)
        if failure:  # the others may be at another place: they fail too
            break
    dist.destroy_process_group()


def spawn(run: Callable[[int, int, str], None], all_ranks: tuple[int, ...], folder: Path) -> Path:
    """One group of processes per size runs all cases. Returns the folder with their results."""
    # MKL's products then do not depend on the alignment of a matrix, which differs in another batch.
    with mock.patch.dict(os.environ, {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}):
        groups = [
            torch.multiprocessing.spawn(run, (ranks, str(folder)), nprocs=ranks, join=False)
            for ranks in all_ranks
        ]
        for group in groups:
            while not group.join(timeout=120):
                pass
    return folder


def check_case(folder: Path, ranks: int, name: str) -> None:
    failures = []
    for rank in range(ranks):
        file = folder / f"{ranks}.{name}.{rank}"
        text = file.read_text() if file.exists() else "did not run: an earlier case failed"
        if text:
            failures.append(f"rank {rank}: {text}")
    assert not failures, "\n".join(failures)


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def shampoo(params: Any, ranks: Any = None, **options: Any) -> torch.optim.Optimizer:
    import torchium

    given = {"block_size": 16, "update_freq": 3, "root_method": "eigh", "bucket_bytes": 1000}
    return torchium.Shampoo(params, process_group=ranks, **{**given, **options})


def world() -> Any:
    return dist.group.WORLD


def train(optimizer: Any, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def whole_state(optimizer: Any) -> dict[str, Any]:
    with optimizer.consolidating():
        return optimizer.state_dict()  # type: ignore[no-any-return]


def values(optimizer: Any, params: list[nn.Parameter]) -> dict[str, Tensor]:
    """Parameters and the whole state."""
    result = {f"parameter {i}": p.detach().clone() for i, p in enumerate(params)}
    for i, state in whole_state(optimizer)["state"].items():
        result.update({f"{key} of {i}": value for key, value in state.items()})
    return result


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [key for key in actual if not torch.equal(actual[key], expected[key])]
    assert not different, different


def assert_same_on_all_ranks(tensors: list[Tensor]) -> None:
    own = torch.cat([t.detach().flatten().double() for t in tensors])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    assert all(torch.equal(own, other) for other in every)


def message_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
