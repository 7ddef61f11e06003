"""Costs of phases from a trace of torch.profiler.

A phase is a range named ``torchium::...``, or an operator of torchium on tensors; work belongs to the
innermost. Time is that of kernels by
the range that launched them, and without a CUDA device the time of the operators themselves.

torch records the shapes and dtypes of the operands of operators, not results, and nothing of kernels
that are no operators. So bytes are those of the operands of operators, each once per call, and floating
point operations those of matrix products; both are lower bounds. torchium's own kernels announce
theirs, where they are known before the launch, as arguments of a range ``torchium::work``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

PREFIX = "torchium::"
WORK = "torchium::work"
OTHER = "other"

RANGES = ("cpu_op", "user_annotation")
LAUNCHES = ("cuda_runtime", "cuda_driver")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")

ELEMENT_BYTES = {
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "long int": 8,
    "long": 8,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
# Positions of the factors among the operands.
PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::mv": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::addmv": (1, 2),
    "aten::addmv_": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::baddbmm_": (1, 2),
}
# Operators that only describe memory.
VIEWS = {
    f"aten::{name}"
    for name in [
        "alias",
        "as_strided",
        "detach",
        "detach_",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "flatten",
        "lift_fresh",
        "narrow",
        "new_empty",
        "permute",
        "reshape",
        "resize_",
        "resolve_conj",
        "resolve_neg",
        "result_type",
        "select",
        "set_",
        "slice",
        "split",
        "squeeze",
        "t",
        "to",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
        "view_as",
        "_reshape_alias",
        "_unsafe_view",
        "item",
        "_local_scalar_dense",
    ]
}


@dataclass
class Cost:
    """Of one phase: seconds, lower bounds of bytes and flops, and the seconds that they belong to."""

    calls: int = 0
    seconds: float = 0.0
    counted_seconds: float = 0.0
    bytes: int = 0
    flops: int = 0


@dataclass
class _Range:
    """An event of the host, with the phase that it belongs to."""

    event: dict[str, Any]
    phase: str
    is_counted: bool
    inner: float = 0.0  # microseconds within ranges in it
    launches: bool = field(default=False)
    holds_operator: bool = field(default=False)

    @property
    def end(self) -> float:
        return float(self.event["ts"] + self.event["dur"])


def _operands(event: dict[str, Any]) -> Iterator[tuple[Sequence[int], int]]:
    """Sizes and bytes of an element of every operand that is a tensor."""
    details = event.get("args", {})
    kinds = details.get("Input type", ())
    for sizes, kind in zip(details.get("Input Dims", ()), kinds, strict=False):
        if kind in ELEMENT_BYTES and all(isinstance(size, int) for size in sizes):
            yield sizes, ELEMENT_BYTES[kind]


def _flops(event: dict[str, Any]) -> int:
    """2 m n k of a product of [..., m, k] and [..., k, n]."""
    if event["name"] not in PRODUCTS:
        return 0
    sizes = event.get("args", {}).get("Input Dims", ())
    first, second = PRODUCTS[event["name"]]
    if len(sizes) <= second:
        return 0
    A, B = sizes[first], sizes[second]
    count: int = 2 * math.prod(A) * (B[-1] if len(B) > 1 else 1)
    return count


def _announced(event: dict[str, Any]) -> tuple[int, int]:
    """The flops and bytes that a kernel announces."""
    values = event.get("args", {}).get("Concrete Inputs", ())
    return (int(values[0]), int(values[1])) if len(values) == 2 else (0, 0)


@cache
def _is_phase(name: str) -> bool:
    """Whether a range is a phase. Operators without tensors, such as checks of options, are none."""
    if not name.startswith(PREFIX):
        return False
    schemas = torch._C._jit_get_schemas_for_operator(name)
    arguments = [argument for schema in schemas for argument in schema.arguments]
    return not schemas or any("Tensor" in str(argument.type) for argument in arguments)


def _is_operator(event: dict[str, Any]) -> bool:
    return event["cat"] == "cpu_op" and not event["name"].startswith(PREFIX)


def _is_dispatched_again(event: dict[str, Any], stack: Sequence[_Range]) -> bool:
    """Whether an operator calls itself, as those of derivatives and of autocast do."""
    if event["cat"] != "cpu_op" or not stack:
        return False
    outer = stack[-1].event
    return bool(outer["cat"] == "cpu_op" and outer["name"] == event["name"])


class _Costs:
    """Sums the events of one thread after the other."""

    def __init__(self) -> None:
        self.phases: defaultdict[str, Cost] = defaultdict(Cost)
        self.launched: dict[int, tuple[str, bool]] = {}  # by correlation: phase, counted
        self.on_host: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add_thread(self, events: Iterable[dict[str, Any]]) -> None:
        stack: list[_Range] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1].end <= event["ts"]:
                self._leave(stack.pop(), stack)
            if event["cat"] in LAUNCHES:
                self._launch(event, stack)
            else:
                stack.append(self._enter(event, stack))
        while stack:
            self._leave(stack.pop(), stack)

    def _enter(self, event: dict[str, Any], stack: list[_Range]) -> _Range:
        name = event["name"]
        phase = stack[-1].phase if stack else OTHER
        is_counted = bool(stack) and stack[-1].is_counted
        if name == WORK:
            flops, traffic = _announced(event)
            self.phases[phase].flops += flops
            self.phases[phase].bytes += traffic
            is_counted = True
        elif _is_phase(name):
            phase = name.removeprefix(PREFIX)
            self.phases[phase].calls += not _is_dispatched_again(event, stack)
        elif not is_counted and name in PRODUCTS:
            self._count(event, phase)
            is_counted = True
        if stack and _is_operator(event) and name not in VIEWS:
            stack[-1].holds_operator = True
        return _Range(event, phase, is_counted)

    def _count(self, event: dict[str, Any], phase: str) -> None:
        self.phases[phase].flops += _flops(event)
        self.phases[phase].bytes += sum(math.prod(s) * size for s, size in _operands(event))

    def _launch(self, event: dict[str, Any], stack: list[_Range]) -> None:
        correlation = event.get("args", {}).get("correlation")
        if correlation is None or not stack:
            return
        innermost = stack[-1]
        innermost.launches = True
        counted = innermost.is_counted or _is_operator(innermost.event)
        self.launched[correlation] = innermost.phase, counted

    def _leave(self, left: _Range, stack: list[_Range]) -> None:
        event = left.event
        own = max(0.0, event["dur"] - left.inner)
        if stack:
            stack[-1].inner += event["dur"]
        is_leaf = _is_operator(event) and event["name"] not in VIEWS
        is_leaf = is_leaf and (left.launches or not left.holds_operator)
        if is_leaf and not left.is_counted and any(True for _ in _operands(event)):
            self._count(event, left.phase)
            left.is_counted = True
        seconds = self.on_host[left.phase]
        seconds[0] += 1e-6 * own
        seconds[1] += 1e-6 * own * left.is_counted


def phase_costs(events: Iterable[dict[str, Any]]) -> dict[str, Cost]:
    """Name of a phase -> its costs; ``other`` is what is in no phase."""
    threads: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    kernels = []
    for event in events:
        if event.get("ph") != "X":
            continue
        if event.get("cat") in KERNELS:
            kernels.append(event)
        elif event.get("cat") in RANGES + LAUNCHES:
            threads[event["tid"]].append(event)
    costs = _Costs()
    for thread in threads.values():
        costs.add_thread(thread)
    for kernel in kernels:
        found = costs.launched.get(kernel.get("args", {}).get("correlation"))
        phase, counted = found if found is not None else (OTHER, False)
        costs.phases[phase].seconds += 1e-6 * kernel["dur"]
        costs.phases[phase].counted_seconds += 1e-6 * kernel["dur"] * counted
    if not kernels:
        for phase, (seconds, of_these) in costs.on_host.items():
            costs.phases[phase].seconds += seconds
            costs.phases[phase].counted_seconds += of_these
    return dict(costs.phases)
