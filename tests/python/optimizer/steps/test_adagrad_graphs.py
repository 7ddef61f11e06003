"""Steps that Adagrad and AdaHessian capture in CUDA graphs equal launched steps, bitwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchium
from graph_steps import (
    assert_both_same,
    change_learning_rates_between_replays,
    change_learning_rates_in_tensors,
    check_capture_of_the_caller,
    check_skipped_steps,
    freeze,
    give_gradients,
    graph_count,
    launches_of_a_step,
    reload,
    replace_data,
    set_option,
    train,
    train_with_gradients_anywhere,
    values,
)
from optimizer_cases import assert_same, mlp
from torch import nn
from torch.amp import GradScaler

cuda = pytest.mark.cuda

SHAPES = [(64, 32), (32,), (), (0, 3), (48, 64), (16, 8, 3, 3), (20, 90)]
DIAGONAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"lr_decay": 0.01, "weight_decay": 0.1, "maximize": True, "initial_accumulator_value": 0.5},
    "no_eps": {"eps": 0.0},
}  # fmt: skip
NEWTON = {"root_method": "newton", "initial_accumulator_value": 1.0, "eps": 1e-2}
FULL: dict[str, dict[str, Any]] = {
    "newton": NEWTON,
    "auto": {**NEWTON, "root_method": "auto", "block_size": 100, "lr_decay": 0.01},
    "seldom": {"update_freq": 5, "weight_decay": 0.1, "eps": 1e-2},
    "seldom_newton": {**NEWTON, "update_freq": 5, "maximize": True},
}


def parameters(dtype: torch.dtype = torch.float32, device: str = "cuda") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]


def both(dtype: torch.dtype = torch.float32, **options: Any):
    """The same optimizer twice: with and without graphs."""
    pairs = []
    for graphs in ("always", "never"):
        params = parameters(dtype)
        pairs.append((torchium.Adagrad(params, lr=0.05, graphs=graphs, **options), params))
    return pairs


# ---- without a GPU


@pytest.mark.parametrize("graphs", ["auto", "always", "never", True, False])
@pytest.mark.parametrize("full_matrix", [False, True])
def test_on_a_cpu_nothing_is_captured(graphs, full_matrix):
    options = {"full_matrix": full_matrix, "block_size": 16}
    results = []
    for given in ({"graphs": graphs}, {}):
        params = parameters(device="cpu")
        optimizer = torchium.Adagrad(params, **options, **given)
        train(optimizer, params, 0, 5)
        assert graph_count(optimizer) == 0
        results.append(values(optimizer, params))
    assert_same(*results)
    expected = {True: "always", False: "never"}.get(graphs, graphs)
    assert torchium.Adagrad(params, graphs=graphs).param_groups[0]["graphs"] == expected
    assert torchium.AdaHessian(params, graphs=graphs).param_groups[0]["graphs"] == expected


# ---- diagonal


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", DIAGONAL)
def test_replayed_steps_equal_launched_ones(name, dtype):
    """By kernels; float64 by operators."""
    pairs = both(dtype, **DIAGONAL[name])
    for optimizer, params in pairs:
        train(optimizer, params, 0, 12)
    assert graph_count(pairs[0][0]) == 1
    assert graph_count(pairs[1][0]) == 0
    assert_both_same(pairs)


@cuda
def test_steps_are_replayed_by_default():
    params = parameters()
    optimizer = torchium.Adagrad(params)
    train(optimizer, params, 0, 6)
    assert graph_count(optimizer) == 1
    assert "graphs: auto" in repr(optimizer)


@cuda
@pytest.mark.parametrize("layout", ["permuted", "strided"])
def test_parameters_of_other_layouts(layout):
    pairs = []
    for graphs in ("always", "never"):
        base = torch.linspace(-1, 1, 48 * 64, device="cuda")
        value = base.view(64, 48).t() if layout == "permuted" else base.view(48, 64)[:, ::2]
        params = [nn.Parameter(value), nn.Parameter(torch.ones(7, device="cuda"))]
        pairs.append((torchium.Adagrad(params, lr=0.05, graphs=graphs, weight_decay=0.1), params))
    for optimizer, params in pairs:
        train(optimizer, params, 0, 10)
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


@cuda
@pytest.mark.parametrize("full_matrix", [False, True])
def test_learning_rates_change_between_replays(full_matrix):
    pairs = both(full_matrix=full_matrix, update_freq=4, lr_decay=0.01, eps=1e-2)
    change_learning_rates_between_replays(pairs)
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


@cuda
def test_learning_rates_in_tensors_are_read_again():
    pairs = both()
    change_learning_rates_in_tensors(pairs, 10)
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


CHANGES = {
    "data": replace_data, "reload": reload, "freeze": freeze, "eps": set_option(eps=1e-2),
    "weight_decay": set_option(weight_decay=0.1), "maximize": set_option(maximize=True),
    "lr_decay": set_option(lr_decay=0.1),
}  # fmt: skip


@cuda
@pytest.mark.parametrize("full_matrix", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name, full_matrix):
    pairs = both(full_matrix=full_matrix, update_freq=50, eps=1e-2)
    for optimizer, params in pairs:
        train(optimizer, params, 0, 40)
    assert graph_count(pairs[0][0]) > 0
    for optimizer, params in pairs:
        CHANGES[name](optimizer, params)
        train(optimizer, params, 40, 30)
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


@cuda
@pytest.mark.parametrize("full_matrix", [False, True])
def test_gradients_may_lie_anywhere(full_matrix):
    pairs = both(full_matrix=full_matrix, **NEWTON)
    train_with_gradients_anywhere(pairs, 12)
    assert graph_count(pairs[0][0]) == 1
    assert_both_same(pairs)


@cuda
@pytest.mark.parametrize("full_matrix", [False, True])
def test_alignments_and_strides_of_gradients_are_noticed(full_matrix):
    pairs = both(full_matrix=full_matrix, update_freq=50, eps=1e-2)
    for optimizer, params in pairs:
        for index in range(40):
            give_gradients(params, index)
            if index % 3 == 1:
                memory = torch.empty(params[0].numel() + 1, device="cuda")
                params[0].grad = memory[1:].view_as(params[0]).copy_(params[0].grad)
            elif index % 3 == 2:
                params[4].grad = params[4].grad.t().contiguous().t()
            optimizer.step()
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


@cuda
def test_replays_launch_no_other_kernels():
    """One that writes the addresses of the gradients, and the graph."""
    params = parameters()
    optimizer = torchium.Adagrad(params, graphs="always")
    train(optimizer, params, 0, 6)
    give_gradients(params, 6)
    assert launches_of_a_step(optimizer) == ["cudaLaunchKernel", "cudaGraphLaunch"]


@cuda
@pytest.mark.parametrize("full_matrix", [False, True])
def test_skipped_steps_are_skipped_and_reported(full_matrix):
    pairs = both(full_matrix=full_matrix, update_freq=7, eps=1e-2)
    check_skipped_steps(pairs)


@cuda
def test_scaled_losses():
    pairs = both()
    for optimizer, params in pairs:
        scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=4)
        for index in range(14):
            for p in params:
                p.grad = None
            scaler.scale(sum((p * (1 + index % 3)).square().sum() for p in params)).backward()
            if index == 9:
                params[1].grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)
    assert pairs[0][0].state[pairs[0][1][0]]["step"].item() == 13


@cuda
def test_a_capture_of_the_caller_has_no_graph_in_it():
    check_capture_of_the_caller(both(), before=6)


@cuda
def test_memory_is_reported():
    params = parameters()
    optimizer = torchium.Adagrad(params, graphs="always", full_matrix=True, update_freq=50)
    train(optimizer, params, 0, 40)
    assert graph_count(optimizer) > 0
    assert optimizer.memory_report().total.graphs >= 4 * sum(p.numel() for p in params)
    optimizer.param_groups[0]["graphs"] = "never"
    train(optimizer, params, 40, 1)
    assert optimizer.memory_report().total.graphs == 0


# ---- full matrices


@cuda
@pytest.mark.parametrize("name", FULL)
def test_replayed_steps_of_full_matrices_equal_launched_ones(name):
    pairs = both(full_matrix=True, **FULL[name])
    for optimizer, params in pairs:
        train(optimizer, params, 0, 40)
    assert graph_count(pairs[0][0]) > 0
    assert graph_count(pairs[1][0]) == 0
    assert_both_same(pairs)


@cuda
def test_roots_by_eigenvalues_are_launched():
    """Those of the defaults are due in every step."""
    pairs = both(full_matrix=True)
    for optimizer, params in pairs:
        train(optimizer, params, 0, 8)
    assert graph_count(pairs[0][0]) == 0
    assert_both_same(pairs)


@cuda
def test_the_global_precision_is_noticed():
    pairs = both(full_matrix=True, update_freq=100, eps=1e-2)
    before = torch.get_float32_matmul_precision()
    try:
        for first, precision in ((0, "highest"), (40, "high"), (70, "highest")):
            torch.set_float32_matmul_precision(precision)
            for optimizer, params in pairs:
                train(optimizer, params, first, 40 if first == 0 else 30)
    finally:
        torch.set_float32_matmul_precision(before)
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


# ---- AdaHessian


@cuda
@pytest.mark.parametrize("options", [{}, {"update_each": 3}, {"weight_decay": 0.1, "n_samples": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_follows_the_estimate_is_replayed(options, dtype):
    pairs = []
    for graphs in ("always", "never"):
        model = mlp("cuda", dtype)
        params = list(model.parameters())
        optimizer = torchium.AdaHessian(params, lr=0.05, graphs=graphs, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        torch.manual_seed(0)
        for index in range(20):
            optimizer.zero_grad()
            inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(index))
            model(inputs.to("cuda", dtype)).square().mean().backward(create_graph=True)
            if index == 12:
                params[0].grad = params[0].grad * float("nan")
            optimizer.step()
            torch.cuda.synchronize()  # so that the next estimates follow the skip in both runs
            scheduler.step()
        optimizer.zero_grad()
        pairs.append((optimizer, params))
    assert graph_count(pairs[0][0]) == (2 if "update_each" in options else 1)
    assert graph_count(pairs[1][0]) == 0
    assert_both_same(pairs)


@cuda
def test_estimates_that_are_not_finite_skip_a_replayed_step():
    pairs = []
    for graphs in ("always", "never"):
        param = nn.Parameter(torch.linspace(1, 2, 12, device="cuda"))
        optimizer = torchium.AdaHessian([param], lr=0.05, graphs=graphs)
        torch.manual_seed(0)
        for index in range(8):
            optimizer.zero_grad()
            curvature = 1e30 if index == 5 else 1.0  # of which the square overflows
            loss = 0.5 * curvature * (param - param.detach()).square().sum() + param.sum()
            loss.backward(create_graph=True)
            optimizer.step()
        optimizer.zero_grad()
        pairs.append((optimizer, [param]))
    assert graph_count(pairs[0][0]) == 1
    assert_both_same(pairs)
    assert pairs[0][0].state[pairs[0][1][0]]["step"].item() == 7
