"""The optimizers' operators: schemas, fake kernels, and arguments that do not fit."""

from __future__ import annotations

import pytest
import torch
import torchium  # noqa: F401  registers the operators
from optimizer_cases import assert_same, set_gradients
from torch import Tensor
from torch.library import opcheck

ops = torch.ops.torchium
SHAPES = [(4, 3), (5,), (6, 6), (), (3, 2, 2, 2)]
NAMES = ["shampoo_step_", "shampoo_update_preconditioners_", "adagrad_step_", "adagrad_full_"]


def parameters(device: torch.device | str = "cpu") -> list[Tensor]:
    params = [torch.full(s, 0.5, device=device) for s in SHAPES]
    set_gradients(params, 0)
    return params


def slots(stacks: tuple) -> list[list[Tensor]]:
    """Statistics, roots and failure counts of all slots, as views of the block storage."""
    *tensors, layout = stacks
    rows = [layout[i : i + 5] for i in range(0, len(layout), 5)]
    return [
        [stack[s].narrow(0, start, count) for _, _, s, start, count in rows] for stack in tensors
    ]


def arguments(name: str, device: torch.device | str = "cpu") -> tuple[object, list, dict]:
    """An operator with the arguments of a possible step."""
    params = parameters(device)
    grads = [p.grad for p in params]
    steps = [torch.ones((), dtype=torch.float64, device=device) for _ in params]
    status = torch.tensor([0, 0, -1, 0, -1], device=device)
    zeros = [[torch.zeros_like(p) for p in params] for _ in range(4)]
    lr = torch.tensor(0.1, dtype=torch.float64)
    host_steps = [1] * len(params) if torch.device(device).type == "cuda" else []
    if name.startswith("adagrad"):
        full = name == "adagrad_full_"
        stacks = ops.adagrad_init_state(params, block_size=8, initial_accumulator_value=0.1)
        state = [[], *slots(stacks)] if full else [zeros[0], [], [], []]
        options = {"lr": lr, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-3}
        options |= {"full_matrix": full, "block_size": 8, "update_freq": 1, "maximize": False}
        positional = [params, grads, steps, *state, status]
        return ops.adagrad_step_, positional, {**options, "host_steps": host_steps}

    layout = {"block_size": 4, "merge_dims": True, "preconditioner_1d": "diagonal"}
    state = slots(ops.shampoo_init_state(params, **layout))
    roots = {"eps": 1e-3, "beta2": 0.9, "relative_eps": 0.0, "exponent": None}
    roots |= {"root_method": "auto", **layout}
    if name == "shampoo_update_preconditioners_":
        return ops.shampoo_update_preconditioners_, [params, steps, *state, status], roots
    diagonals = [z for z in zeros[0] if z.dim() < 2]
    options = {"lr": lr, "update_freq": 1, "weight_decay": 0.1, "beta1": 0.9, "momentum": 0.9}
    options |= {"nesterov": True, "decoupled_weight_decay": False, "grafting": "adam"}
    options |= {"grafting_eps": 1e-8, "grafting_beta2": 0.99, "start_preconditioning_step": 1}
    options |= {"maximize": False, "capturable": False, "host_steps": host_steps}
    starts = [torch.zeros_like(step) for step in steps]
    positional = [params, grads, steps, *state, diagonals, *zeros[1:], starts, starts, status]
    return ops.shampoo_step_, positional, {**roots, **options}


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_steps(name, device):
    op, positional, options = arguments(name, device)
    opcheck(op.default, positional, options)


def test_opcheck_of_initial_state(device):
    params = parameters(device)
    layout = {"block_size": 4, "merge_dims": True, "preconditioner_1d": "full"}
    opcheck(ops.shampoo_init_state.default, (params,), layout)
    options = {"block_size": 8, "initial_accumulator_value": 0.1}
    opcheck(ops.adagrad_init_state.default, (params,), options)


@pytest.mark.parametrize("name", NAMES)
def test_any_layout_of_the_state_gives_the_same_step(name):
    """Block storage is only faster: separate slots give the same step."""
    op, positional, options = arguments(name)
    _, apart, _ = arguments(name)
    apart = [[t.clone() for t in x] if isinstance(x, list) else x for x in apart]
    for _ in range(2):
        op(*positional, **options)
        op(*apart, **options)
    torch.testing.assert_close(apart[0], positional[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_into_a_step(name, dtype, device):
    op, positional, options = arguments(name, device)
    _, under_autocast, _ = arguments(name, device)
    op(*positional, **options)
    with torch.autocast(device.type, dtype=dtype):
        op(*under_autocast, **options)
    assert_same(under_autocast, positional)


def drop_last(positional: list, which: int) -> None:
    positional[which] = positional[which][:-1]


def wrong_shape(positional: list, which: int) -> None:
    positional[which] = [torch.zeros(7, 7) for _ in positional[which]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", [drop_last, wrong_shape])
def test_lists_that_do_not_fit_are_refused_and_nothing_changes(name, damage):
    op, positional, options = arguments(name)
    params = [p.clone() for p in positional[0]]
    # All lists except the parameters; the state lists of this operator.
    for which in range(1, len(positional) - 1):
        if not positional[which]:
            continue
        _, damaged, _ = arguments(name)
        damage(damaged, which)
        with pytest.raises(ValueError, match=r"\d"):
            op(*damaged, **options)
        assert_same([p.detach() for p in damaged[0]], params)


@pytest.mark.parametrize("name", NAMES)
def test_float8_is_refused_by_name(name):
    """torch calls it floating-point, but has no arithmetic for it."""
    op, _, options = arguments(name)
    for which in range(2 if "step" in name or "full" in name else 1):
        _, damaged, _ = arguments(name)
        damaged[which][1] = damaged[which][1].to(torch.float8_e4m3fn)
        label = ("params", "grads")[which]
        with pytest.raises(
            ValueError, match=rf"{label}\[1\] has dtype Float8_e4m3fn; only float32"
        ):
            op(*damaged, **options)


@pytest.mark.cuda
def test_steps_on_a_gpu_need_the_counts_of_the_host():
    op, positional, options = arguments("shampoo_step_", "cuda")
    with pytest.raises(ValueError, match="host_steps"):
        op(*positional, **{**options, "host_steps": []})
