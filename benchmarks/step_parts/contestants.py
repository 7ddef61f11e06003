"""The optimizers of the step benchmark: ours and others from PyPI."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
import torchium
from torch import nn

from step_parts.shapes import Model, matrix_shape

BETAS = (0.9, 0.95)
LR = 1e-5
CYCLE = 10  # steps between root updates
MOST_UNBLOCKED = 1024  # matrix order above which one full SVD takes seconds


class Steps(Protocol):
    def step(self) -> object: ...


Parameters = list[nn.Parameter]


@dataclass(frozen=True)
class Contestant:
    """`make` raises if the contestant cannot be measured; the table shows its message."""

    name: str
    make: Callable[[Parameters], Steps]
    cycle: int  # period of its costs in steps
    tf32: bool = False
    exponent: float = 1.0  # of the gradients' spectra
    is_ours: bool = False  # its parts are profiled


class Captured:
    """Shampoo in two CUDA graphs: one for its step, one for the periodic root update."""

    def __init__(self, optimizer: torchium.Shampoo, cycle: int) -> None:
        for _ in range(2):
            optimizer.step()
        optimizer.update_preconditioners()
        self._step, self._roots = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._step):
            optimizer.step()
        with torch.cuda.graph(self._roots):
            optimizer.update_preconditioners()
        self._optimizer = optimizer  # its state lives as long as the graphs
        self._cycle, self._count = cycle, 0

    def step(self) -> None:
        self._step.replay()
        self._count += 1
        if self._count % self._cycle == 0:
            self._roots.replay()


class CapturedAdamW:
    def __init__(self, params: Parameters) -> None:
        self._optimizer = torch.optim.AdamW(params, lr=LR, betas=BETAS, fused=True, capturable=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._optimizer.step()

    def step(self) -> None:
        self._graph.replay()


def need_cuda(params: Parameters) -> None:
    if not params[0].is_cuda:
        raise RuntimeError("CUDA graphs need a CUDA device")


def shampoo(params: Parameters, block_size: int, tf32: bool, **options: object) -> torchium.Shampoo:
    options["matmul_precision"] = "high" if tf32 else "highest"
    return torchium.Shampoo.from_adamw(params, lr=LR, betas=BETAS, block_size=block_size, **options)


def ours(model: Model) -> Iterator[Contestant]:
    def eager(update_freq: int, tf32: bool, exponent: float) -> Contestant:
        return Contestant(
            f"torchium Shampoo, every {update_freq}",
            lambda ps: shampoo(ps, model.block_size, tf32, update_freq=update_freq),
            1 if update_freq == 1 else CYCLE,
            tf32,
            exponent,
            is_ours=True,
        )

    def captured(tf32: bool) -> Contestant:
        def make(params: Parameters) -> Steps:
            need_cuda(params)
            return Captured(shampoo(params, model.block_size, tf32, capturable=True), CYCLE)

        name = f"torchium Shampoo, every {CYCLE}, CUDA graphs"
        return Contestant(name, make, CYCLE, tf32, is_ours=True)

    # Measured like the others: roots of power -1/4, and no averages besides statistics and roots.
    def plain(update_freq: int, tf32: bool, root_dtype: torch.dtype | None = None) -> Contestant:
        options = {"betas": (0.0, 0.99), "grafting": "sgd", "relative_eps": 1e-4}
        options |= {"root_dtype": root_dtype}
        options |= {"update_freq": update_freq, "block_size": model.block_size}
        options |= {"matmul_precision": "high" if tf32 else "highest"}
        return Contestant(
            f"torchium Shampoo, no averages{', 16-bit roots' if root_dtype else ''}, "
            f"every {update_freq}",
            lambda ps: torchium.Shampoo(ps, lr=LR, **options),
            1 if update_freq == 1 else CYCLE,
            tf32,
        )

    for tf32 in (False, True):
        yield plain(1, tf32)
        yield plain(CYCLE, tf32)
        yield plain(CYCLE, tf32, torch.bfloat16)
        yield eager(1, tf32, 1.0)
        yield eager(1, tf32, 2.0)
        yield eager(CYCLE, tf32, 1.0)
        yield captured(tf32)


def adamw() -> Iterator[Contestant]:
    def captured(params: Parameters) -> Steps:
        need_cuda(params)
        return CapturedAdamW(params)

    yield Contestant(
        "AdamW fused", lambda ps: torch.optim.AdamW(ps, lr=LR, betas=BETAS, fused=True), 1
    )
    yield Contestant("AdamW fused, CUDA graph", captured, 1)
    yield Contestant(
        "AdamW foreach", lambda ps: torch.optim.AdamW(ps, lr=LR, betas=BETAS, foreach=True), 1
    )


def pytorch_optimizer_peers(model: Model) -> dict[str, Callable[[Parameters], Steps]]:
    def package() -> ModuleType:
        import pytorch_optimizer

        return pytorch_optimizer

    def whole(params: Parameters) -> Steps:
        largest = max(max(matrix_shape(s)) for s in model.shapes if len(s) > 1)
        module = package()
        if largest > MOST_UNBLOCKED:
            raise RuntimeError(f"not run: without blocks, it takes SVDs of order {largest}")
        return module.Shampoo(params, lr=LR, preconditioning_compute_steps=CYCLE)

    def scalable(params: Parameters) -> Steps:
        return package().ScalableShampoo(
            params,
            lr=LR,
            betas=BETAS,
            block_size=model.block_size,
            start_preconditioning_step=1,
            preconditioning_compute_steps=CYCLE,
        )

    def soap(params: Parameters) -> Steps:
        return package().SOAP(params, lr=LR, betas=BETAS, precondition_frequency=CYCLE)

    def dash(params: Parameters) -> Steps:
        return package().DASH(
            params,
            lr=LR,
            betas=BETAS,
            block_size=model.block_size,
            precondition_frequency=CYCLE,
        )

    made = {"Shampoo": whole, "ScalableShampoo": scalable, "SOAP": soap, "DASH": dash}
    return {f"pytorch-optimizer {name}, every {CYCLE}": make for name, make in made.items()}


class Quiet:
    """DASH prints its allocations in its first step."""

    def __init__(self, optimizer: Steps) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._optimizer.step()


def dash_package() -> ModuleType:
    """The package ista_daslab_optimizers.dash alone.

    Its parent imports CUDA extensions that DASH does not use, so the parent is not run. wandb, which DASH
    imports to log histograms on request, is replaced by an empty module if missing.
    """
    parent = "ista_daslab_optimizers"
    if parent not in sys.modules:
        spec = importlib.util.find_spec(parent)
        if spec is None:
            raise ImportError(f"No module named '{parent}'")
        module = ModuleType(parent)
        module.__path__ = list(spec.submodule_search_locations or [])
        sys.modules[parent] = module
    if importlib.util.find_spec("wandb") is None:
        sys.modules["wandb"] = ModuleType("wandb")
        sys.modules["wandb"].__spec__ = importlib.util.spec_from_loader("wandb", None)
    return importlib.import_module(f"{parent}.dash")


def dash_peers(model: Model) -> dict[str, Callable[[Parameters], Steps]]:
    """With DASH's coupled Newton iteration; fp16 products need its Triton kernels."""

    def with_products(dtype: torch.dtype) -> Callable[[Parameters], Steps]:
        def make(params: Parameters) -> Steps:
            dash = dash_package()
            if dtype != torch.float32 and not params[0].is_cuda:
                raise RuntimeError("its fp16 kernels need a CUDA device")
            config = dash.DashConfig(
                block_size=model.block_size,
                inv_root_freq=CYCLE,
                inv_root_method=dash.DashInverseRootMethodType.CN,
                matmul_dtype=dtype,
            )
            return Quiet(dash.DashGpu(params, lr=LR, weight_decay=0.0, config=config))

        return make

    return {
        f"DASH fp16, every {CYCLE}": with_products(torch.float16),
        f"DASH float32, every {CYCLE}": with_products(torch.float32),
    }


def contestants(model: Model, families: list[str]) -> list[list[Contestant]]:
    """From the families "ours", "adamw", "pytorch-optimizer" and "dash", in groups that take turns: ours and
    AdamW, then each of the others with and without TF32.
    """
    together = [*adamw()] if "adamw" in families else []
    together += [*ours(model)] if "ours" in families else []
    peers = pytorch_optimizer_peers(model) if "pytorch-optimizer" in families else {}
    peers |= dash_peers(model) if "dash" in families else {}
    alone = [
        [Contestant(name, make, CYCLE, tf32) for tf32 in (False, True)]
        for name, make in peers.items()
    ]
    return [together, *alone] if together else alone
