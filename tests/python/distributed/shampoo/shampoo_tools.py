"""Parameters and training for processes that share the steps of Shampoo."""

from __future__ import annotations

from typing import Any

import torch
from group_tools import assert_same, copies_of, whole_state
from ranks import device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

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
    # Matrices, a convolution and others as vectors, which shards cut anywhere.
    "flattened": {
        "target_order": 1,
        "block_size": 256,
        "preconditioner_1d": "full",
        "grafting": "adam",
        "betas": (0.9, 0.99),
    },
    "as_given": {"target_order": 0, "preconditioner_1d": "full", "grafting": "sgd"},
    "diagonal": {"max_preconditioned_dim": 30, "grafting": "sgd", "betas": (0.5, 0.9)},
}


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(device(), dtype))
        for shape in shapes
    ]


def set_gradients(params: list[Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        grad = torch.randn(p.shape, generator=generator).to(device(), p.dtype)
        if isinstance(p, DTensor):  # of the same numbers on all ranks, none of which sends any
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad


def shampoo(params: Any, ranks: Any = None, **options: Any) -> torch.optim.Optimizer:
    import torchium

    given: dict[str, Any] = {
        "block_size": 16,
        "update_freq": 3,
        "root_method": "eigh",
        "bucket_bytes": 1000,
    }
    if device().type == "cuda":  # where roots of ill-conditioned matrices amplify rounding
        given |= {"eps": 1e-2, "root_method": "newton"}
    return torchium.Shampoo(params, process_group=ranks, **{**given, **options})


def train(optimizer: Any, params: list[Any], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def values(optimizer: Any, params: list[Any]) -> dict[str, Tensor]:
    """Parameters and the whole state."""
    result = {
        f"parameter {i}": (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for i, p in enumerate(params)
    }
    for i, state in whole_state(optimizer)["state"].items():
        result.update({f"{key} of {i}": value for key, value in state.items()})
    return result


def assert_agree(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit; on a GPU the parameters alone, up to the scales of 16-bit parts (docs/distributed.md)."""
    if device().type == "cpu":
        assert_same(actual, expected)
        return
    for key in [key for key in expected if key.startswith("parameter")]:
        difference = (actual[key] - expected[key]).norm()
        assert difference <= 1e-3 * expected[key].norm(), (key, difference)


def assert_copies_go_on(optimizer: Any, params: list[Any], steps: range) -> None:
    """A copy and a pickle take the same steps as the optimizer."""
    copies = copies_of((params, optimizer))
    train(optimizer, params, steps)
    for other_params, other in copies:
        train(other, other_params, steps)
        assert_same(values(other, other_params), values(optimizer, params))
