"""Comparisons between the processes of a group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> Any:
    return dist.group.WORLD


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


@contextmanager
def in_one_process() -> Iterator[None]:
    """As if no other process ran, for an optimizer without a group."""
    with mock.patch("torchium.optimizers._core.capturing.processes", return_value=1):
        yield


def whole_state(optimizer: Any) -> dict[str, Any]:
    with optimizer.consolidating():
        return optimizer.state_dict()  # type: ignore[no-any-return]


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
    """The type and the text of what the call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@contextmanager
def replaced_operator(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """An operator of ATen on the CPU of this rank."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, function, "CPU")
    try:
        yield
    finally:
        library._destroy()


def out_of_memory_in(operator: str) -> AbstractContextManager[None]:
    """As if this rank had no memory for the results of an operator on the CPU."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError(f"none left for {operator}")

    return replaced_operator(operator, fail)
