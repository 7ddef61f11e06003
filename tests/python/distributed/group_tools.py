"""Comparisons between the processes of a group."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from ranks import device
from torch import Tensor

Pair = TypeVar("Pair", bound=tuple[Any, Any])


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


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{i}.{key}": x for i, each in state["state"].items() for key, x in each.items()}


def assert_one_rank_takes_the_state(optimizer: Any) -> None:
    expected = flat(whole_state(optimizer))
    last = dist.get_world_size() - 1
    optimizer.consolidate_state_dict(to=last)
    kind, message = message_of(lambda: assert_same(flat(optimizer.state_dict()), expected))
    if is_last():
        assert kind == "", message
        kind, message = message_of(optimizer.state_dict)  # it is kept once
    assert kind == "RuntimeError", message


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


def message_of_step(optimizer: Any) -> tuple[str, str]:
    """Also of what a GPU reports after the step."""

    def step_and_check() -> None:
        optimizer.step()
        optimizer.check_errors()

    return message_of(step_and_check)


def assert_raised_on_all(raised: tuple[str, str], own: str, call: str = "step()") -> None:
    """raised: what message_of() gives where the last rank alone has an error, with `own` in its text."""
    kind, message = raised
    if is_last():
        assert kind == "ValueError", message
        assert own in message, message
    else:
        last = dist.get_world_size() - 1
        assert kind == "RuntimeError", message
        assert f"rank {last} of the process group raised an error in {call}" in message, message


def copies_of(pair: Pair) -> tuple[Pair, Pair]:
    """A copy and a pickle of parameters, or a model, with their optimizer."""
    return copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))


@contextmanager
def replaced_operator(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """An operator of ATen on the device of this rank."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, function, device().type.upper())
    try:
        yield
    finally:
        library._destroy()


def out_of_memory_in(operator: str) -> AbstractContextManager[None]:
    """As if this rank had no memory for the results of an operator on its device."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError(f"none left for {operator}")

    return replaced_operator(operator, fail)
