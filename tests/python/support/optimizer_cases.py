"""Optimizers, models and training loops shared by the contract tests."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torchium
from torch import Tensor, nn

Make = Callable[..., torch.optim.Optimizer]


def _case(cls: type[torch.optim.Optimizer], **options: object) -> Make:
    return lambda params, **more: cls(params, **{**options, **more})


# Together they create every kind of state. These accept any gradients:
CASES: dict[str, Make] = {
    "shampoo": _case(torchium.Shampoo, lr=0.05, update_freq=2),
    "shampoo_all_buffers": _case(
        torchium.Shampoo,
        lr=0.005,
        update_freq=3,
        weight_decay=0.01,
        betas=(0.9, 0.99),
        momentum=0.9,
        nesterov=True,
        grafting="adam",
        block_size=4,
        preconditioner_1d="full",
    ),
    "shampoo_unpreconditioned": _case(
        torchium.Shampoo, lr=0.01, betas=(0.9, 0.99), grafting="adam", preconditioned=False
    ),
    "adagrad": _case(torchium.Adagrad, lr=0.05, lr_decay=0.01, weight_decay=0.01),
    "adagrad_full": _case(
        torchium.Adagrad, lr=0.05, eps=1e-2, full_matrix=True, block_size=8, update_freq=2
    ),
}

# These need the gradients of a backward pass:
CAPTURING_CASES: dict[str, Make] = {
    "kfac": _case(torchium.KFAC, lr=0.02, TCov=2, TInv=3, weight_decay=0.01, kl_clip=None),
    "kfac_newton": _case(torchium.KFAC, lr=0.02, TCov=2, TInv=3, solver="newton"),
    "kfac_exact": _case(torchium.KFAC, lr=0.05, momentum=0.0, TCov=1, damping_split="exact"),
    "kfac_bfloat16_factors": _case(torchium.KFAC, lr=0.02, TCov=2, TInv=3, factor_dtype="bfloat16"),
    "kfac_inverse_free": _case(
        torchium.KFAC, lr=0.2, TCov=1, solver="inverse_free", structures=("dense", "toeplitz")
    ),
    "kfac_inverse_free_blocks": _case(
        torchium.KFAC,
        lr=0.2,
        TCov=2,
        solver="inverse_free",
        structures=("block_diagonal", "diagonal"),
        block_size=3,
        factor_dtype="bfloat16",
    ),
    "ekfac": _case(torchium.KFAC, lr=0.05, TCov=1, TInv=3, damping_split="exact", ekfac=True),
    "natural_gradient": _case(torchium.NaturalGradient, lr=0.1, damping=0.1, momentum=0.5),
    "natural_gradient_between": _case(
        torchium.NaturalGradient, lr=0.1, damping=0.1, update_freq=3, max_norm=1.0
    ),
}
ALL_CASES = {**CASES, **CAPTURING_CASES}

plain_cases = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
capturing_cases = pytest.mark.parametrize(
    "make", CAPTURING_CASES.values(), ids=CAPTURING_CASES.keys()
)
all_cases = pytest.mark.parametrize("make", ALL_CASES.values(), ids=ALL_CASES.keys())
_KFAC_CASES = [make for name, make in CAPTURING_CASES.items() if "kfac" in name]
# All parameters may have any gradients: those without a layer fall back to SGD.
plain_or_kfac_cases = pytest.mark.parametrize("make", [*CASES.values(), *_KFAC_CASES])
ignore_fallback = pytest.mark.filterwarnings(
    "ignore:KFAC preconditions", "ignore:KFAC keeps only the diagonal"
)


def mlp(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two linear layers with a norm between them: matrices of two sizes and vectors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    return model.to(device, dtype)


def set_gradients(params: Iterable[Tensor], seed: int) -> None:
    """Set gradients that depend only on `seed`, the parameter's position and its shape."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


def backward(model: nn.Module, seed: int, sign: float = 1.0) -> None:
    """Set the gradients of an mlp() from a batch that depends on `seed`."""
    generator = torch.Generator().manual_seed(seed)
    parameter = next(model.parameters())
    inputs, weights = torch.randn(2, 8, 6, generator=generator).to(parameter.device)
    model.zero_grad()
    outputs = model(inputs.to(parameter.dtype))
    weights = weights[:, : outputs.shape[1]].to(parameter.dtype)
    (sign * outputs * weights).sum(1).mean().backward()


def give_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Set gradients of an mlp() that the optimizer accepts."""
    if isinstance(optimizer, (torchium.KFAC, torchium.NaturalGradient)):
        backward(model, seed)
    else:
        set_gradients((p for p in model.parameters() if p.requires_grad), seed)


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, steps: int = 4
) -> list[Tensor]:
    """Run steps `first` to `first + steps - 1` of a fixed sequence of gradients; return the parameters."""
    for step in range(first, first + steps):
        give_gradients(model, optimizer, step)
        optimizer.step()
    return values(model)


def trained(make: Make, device: torch.device | str = "cpu") -> tuple[nn.Module, Any]:
    """An mlp() and its optimizer after 4 steps."""
    model = mlp(device)
    optimizer = make(model.parameters())
    run(model, optimizer)
    return model, optimizer


def computed_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State except captured tensors, which are kept unchanged."""
    captured = ("inputs", "output_gradients", "uses", "use_eps", "use_samples")
    return {key: value for key, value in state.items() if key.split(".")[0] not in captured}


# Of state, whose dtype does not depend on that of the parameter.
COUNTS = (
    "step",
    "exp_avg_start",
    "grafting_second_moment_start",
    "factor_updates",
    "moment_updates",
)


def state_in_own_dtype(optimizer: Any, param: Tensor) -> list[tuple[str, Tensor]]:
    """The computed state except factors for which an option sets the dtype."""
    group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    free = ("A", "G", "K", "C", "m_K", "m_C") if group.get("factor_dtype") else ()
    state = computed_state(optimizer.state[param])
    return [(key, tensor) for key, tensor in state.items() if key not in free]


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def through_a_file(saved: Any, **options: Any) -> Any:
    """What `torch.load` gives with these options."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, **{"weights_only": True, **options})


def assert_same(actual: object, expected: object) -> None:
    """Assert bitwise equality, through any nesting of dicts and sequences."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(actual[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert actual == expected


def assert_goes_on_as_a_copy(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    """A copy has no plans yet, so it checks everything again."""
    other, other_optimizer = copy.deepcopy((model, optimizer))
    run(model, optimizer, 50, steps)
    run(other, other_optimizer, 50, steps)
    # Shampoo and Adagrad batch the matrices of a copy, not separate ones: rounding may differ.
    captures = isinstance(optimizer, (torchium.KFAC, torchium.NaturalGradient))
    bounds = {"rtol": 0.0, "atol": 0.0} if captures else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(values(model), values(other), **bounds)
    states = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    torch.testing.assert_close(*states, **bounds)


def snapshot(optimizer: torch.optim.Optimizer) -> tuple[dict, list[Tensor]]:
    """Everything that a failed call must not change."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return optimizer.state_dict(), [p.detach().clone() for p in params]
