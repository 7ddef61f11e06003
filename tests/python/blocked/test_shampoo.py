"""torchium.Shampoo beyond the common contract. For its mathematics see test_trajectories.py."""

from __future__ import annotations

import pytest
import torch
import torchium
from optimizer_cases import assert_same, mlp, run, set_gradients, values
from torch import nn
from torch.optim import lr_scheduler


def roots_change_at(steps: int, **options) -> list[int]:
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = torchium.Shampoo([p], **options)
    due, previous = [], torch.eye(4).expand(1, 4, 4)
    for step in range(1, steps + 1):
        set_gradients([p], step)
        optimizer.step()
        root = optimizer.state[p]["roots.0"].clone()
        if not torch.equal(root, previous):
            due.append(step)
        previous = root
    return due


@pytest.mark.parametrize(
    ("update_freq", "expected"),
    [
        (1, list(range(1, 18))),
        (2, [*range(1, 9), 10, 12, 14, 16]),
        (5, [*range(1, 9), 10, 12, 14, 15, 16]),
        (100, [*range(1, 9), 10, 12, 14, 16]),
    ],
)
def test_roots_are_due_often_at_first(update_freq, expected):
    assert roots_change_at(17, update_freq=update_freq) == expected


def test_exponent_warmup_counts_the_steps_of_each_parameter():
    """L^(-1/p), p from 4 to 2, by each parameter's own step count."""
    early, late = (nn.Parameter(torch.zeros(4, 4, dtype=torch.float64)) for _ in range(2))
    optimizer = torchium.Shampoo(
        [early, late], update_freq=1, eps=1e-3, exponent=-0.5, exponent_warmup=4
    )
    expected = {early: [4, 3, 3, 2, 2], late: [None, None, 4, 3, 3]}
    for step in range(5):
        set_gradients([early, late] if step >= 2 else [early], step)
        optimizer.step()
        for p, orders in expected.items():
            if orders[step] is not None:
                L = optimizer.state[p]["statistics.0"][0]
                root = torchium.linalg.matrix_inverse_root(L, orders[step], eps=1e-3)
                torch.testing.assert_close(optimizer.state[p]["roots.0"][0], root)


def test_first_step_by_hand():
    """G = diag(3, 4) has the statistics diag(9, 16) in both modes: the direction is the identity."""
    p = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    p.grad = torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64))
    torchium.Shampoo([p], lr=1.0, eps=0.0).step()
    torch.testing.assert_close(p.detach(), -torch.eye(2, dtype=torch.float64))


def test_statistics_are_sums_of_outer_products():
    p = nn.Parameter(torch.zeros(4, 3))
    optimizer = torchium.Shampoo([p])
    left, right = torch.zeros(4, 4), torch.zeros(3, 3)
    for step in range(5):
        set_gradients([p], step)
        left += p.grad @ p.grad.mT
        right += p.grad.mT @ p.grad
        optimizer.step()
    state = optimizer.state[p]
    torch.testing.assert_close(state["statistics.0"][0], left)
    torch.testing.assert_close(state["statistics.1"][0], right)
    assert state["step"] == 5


@pytest.mark.parametrize(
    ("shape", "options", "sizes"),
    [
        ((6, 4), {}, [6, 4]),
        ((6, 1, 4), {}, [6, 4]),
        ((8, 3, 2, 2), {}, [8, 12]),
        ((8, 3, 2, 2), {"merge_dims": False}, [8, 3, 2, 2]),
        ((7,), {"preconditioner_1d": "full"}, [7]),
        ((7,), {}, []),
        ((), {}, []),
        ((1, 7), {}, []),
    ],
)
def test_sizes_of_the_matrices(shape, options, sizes):
    p = nn.Parameter(torch.ones(shape))
    optimizer = torchium.Shampoo([p], **options)
    set_gradients([p], 0)
    optimizer.step()
    state = optimizer.state[p]
    matrices = [v.shape[-1] for k, v in state.items() if k.startswith("statistics")]
    assert sorted(matrices) == sorted(sizes)
    assert ("diagonal" in state) == (not sizes)


def test_blocks_that_do_not_divide():
    p = nn.Parameter(torch.ones(5, 3))
    optimizer = torchium.Shampoo([p], block_size=2)
    set_gradients([p], 0)
    optimizer.step()
    state = optimizer.state[p]
    total = sum(v.shape[0] * v.shape[1] for k, v in state.items() if k.startswith("statistics"))
    # 3 x 2 blocks; each row of blocks covers 3 columns and each column of blocks 5 rows.
    assert total == 2 * 5 + 3 * 3


def test_before_the_start_the_step_is_that_of_sgd():
    model, other = mlp(), mlp()
    optimizer = torchium.Shampoo(model.parameters(), lr=0.1, start_preconditioning_step=4)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    torch.testing.assert_close(run(model, optimizer, 0, 3), run(other, sgd, 0, 3))
    run(model, optimizer, 3, 1)
    run(other, sgd, 3, 1)
    assert not torch.allclose(values(model)[0], values(other)[0])


def test_start_with_grafted_adam_is_adam():
    model, other = mlp(), mlp()
    optimizer = torchium.Shampoo(
        model.parameters(),
        lr=0.01,
        betas=(0.9, 1.0),
        grafting="adam",
        start_preconditioning_step=100,
    )
    adam = torch.optim.Adam(other.parameters(), lr=0.01)
    torch.testing.assert_close(
        run(model, optimizer, 0, 6), run(other, adam, 0, 6), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("grafting", ["sgd", "adagrad", "rmsprop", "adam"])
def test_grafting_gives_the_norm_of_the_grafted_step(grafting):
    p = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    optimizer = torchium.Shampoo([p], lr=1.0, grafting=grafting)
    set_gradients([p], 0)
    optimizer.step()
    g = p.grad
    squares = {"sgd": None, "adagrad": g**2, "rmsprop": 0.001 * g**2, "adam": g**2}[grafting]
    expected = g if squares is None else g / (squares.sqrt() + 1e-8)
    torch.testing.assert_close(p.detach().norm(), expected.norm(), rtol=1e-6, atol=0)


def test_momentum_turned_on_in_mid_run_starts_from_zero():
    model, other = mlp(), mlp()
    optimizer = torchium.Shampoo(model.parameters(), lr=0.1)
    reference = torchium.Shampoo(other.parameters(), lr=0.1)
    run(model, optimizer)
    run(other, reference)
    assert "momentum_buffer" not in optimizer.state[model[0].weight]
    optimizer.param_groups[0].update(momentum=0.9)
    # The first buffer is the direction itself.
    torch.testing.assert_close(run(model, optimizer, 4, 1), run(other, reference, 4, 1))
    assert optimizer.state[model[0].weight]["momentum_buffer"].any()
    run(model, optimizer, 5, 1)
    run(other, reference, 5, 1)
    assert not torch.allclose(values(model)[0], values(other)[0])


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ({"betas": (0.9, 1.0)}, "exp_avg"),
        ({"grafting": "adagrad"}, "grafting_second_moment"),
        ({"momentum": 0.5}, "momentum_buffer"),
    ],
)
def test_buffers_appear_when_an_option_needs_them(option, key):
    model = mlp()
    optimizer = torchium.Shampoo(model.parameters())
    run(model, optimizer)
    assert all(key not in optimizer.state[p] for p in model.parameters())
    optimizer.param_groups[0].update(option)
    run(model, optimizer, 4, 2)
    for p in model.parameters():
        assert optimizer.state[p][key].shape == p.shape
    # If turned off again it stays in a checkpoint; a step drops averages, which would become stale.
    optimizer.param_groups[0].update({k: optimizer.defaults[k] for k in option})
    kept = optimizer.state[model[0].weight][key].clone()
    other = torchium.Shampoo(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    assert_same(other.state[model[0].weight][key], kept)
    run(model, other, 6, 1)
    assert (key in other.state[model[0].weight]) == (key == "momentum_buffer")


@pytest.mark.parametrize("make", [lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR])
def test_schedulers_that_cycle_momentum_cycle_the_first_beta(make):
    model = mlp()
    optimizer = torchium.Shampoo(model.parameters(), lr=0.01, grafting="adam", betas=(0.9, 0.99))
    if make is lr_scheduler.OneCycleLR:
        scheduler = make(optimizer, max_lr=0.1, total_steps=12)
    else:
        scheduler = make(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3)
    seen = []
    for step in range(10):
        seen.append(optimizer.param_groups[0]["betas"])
        run(model, optimizer, step, 1)
        scheduler.step()
    assert len({beta1 for beta1, _ in seen}) > 3
    assert {beta2 for _, beta2 in seen} == {0.99}
    assert all(torch.isfinite(p).all() for p in model.parameters())
    optimizer.check_errors()


def test_one_cycle_over_the_defaults_brings_in_the_average():
    model = mlp()
    optimizer = torchium.Shampoo(model.parameters())
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    for step in range(5):
        run(model, optimizer, step, 1)
        scheduler.step()
    assert optimizer.state[model[0].weight]["exp_avg"].any()


def test_relative_damping_follows_the_scale_of_the_gradient():
    """With eps = 0 a gradient scaled by c moves the parameter by the same step."""
    steps = []
    for scale in (1.0, 1e3):
        p = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
        set_gradients([p], 0)
        p.grad.mul_(scale)
        torchium.Shampoo([p], eps=0.0, relative_eps=1e-3).step()
        steps.append(p.detach())
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-6, atol=1e-9)


# ---- roots that fail


def break_statistics(optimizer, p):
    optimizer.state[p]["statistics.0"].fill_(torch.nan)


@pytest.mark.parametrize("max_root_failures", [1, 3])
def test_failed_roots_keep_the_last_good_one_and_raise_in_the_end(max_root_failures):
    model = mlp()
    optimizer = torchium.Shampoo(
        model.named_parameters(), update_freq=1, max_root_failures=max_root_failures
    )
    run(model, optimizer)
    broken = model[3].weight
    good_root = optimizer.state[broken]["roots.0"].clone()
    break_statistics(optimizer, broken)
    run(model, optimizer, 4, max_root_failures - 1)
    with pytest.raises(RuntimeError, match=r"'3.weight' of group 0"):
        run(model, optimizer, 10, 1)
    state = optimizer.state[broken]
    assert_same(state["roots.0"], good_root)
    assert state["root_failures.0"].tolist() == [max_root_failures]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"'3.weight' of group 0"):
        optimizer.check_errors()


def test_the_named_parameter_is_that_of_the_failure_whatever_has_gradients_later():
    model = mlp()
    optimizer = torchium.Shampoo(model.named_parameters(), update_freq=100, max_root_failures=2)
    run(model, optimizer, 0, 8)
    break_statistics(optimizer, model[3].weight)
    run(model, optimizer, 8, 3)  # the first failure, at step 10
    optimizer.param_groups[0]["max_root_failures"] = 1
    optimizer.zero_grad()
    model[3].weight.grad = torch.ones_like(model[3].weight)
    with pytest.raises(RuntimeError, match=r"'3.weight' of group 0"):
        optimizer.step()
    set_gradients(model[1].parameters(), 0)
    with pytest.raises(RuntimeError, match=r"'3.weight' of group 0"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"'3.weight' of group 0"):
        optimizer.check_errors()


def test_a_good_root_starts_the_count_of_failures_again():
    model = mlp()
    optimizer = torchium.Shampoo(model.parameters(), update_freq=1)
    run(model, optimizer)
    broken = model[3].weight
    for _ in range(3):
        kept = optimizer.state[broken]["statistics.0"].clone()
        break_statistics(optimizer, broken)
        run(model, optimizer, 4, 2)
        optimizer.state[broken]["statistics.0"].copy_(kept)
        run(model, optimizer, 6, 1)
    assert optimizer.state[broken]["root_failures.0"].tolist() == [0]
    optimizer.check_errors()


# ---- capturable: separate steps and root updates


def test_capturable_step_computes_no_root():
    assert roots_change_at(9, update_freq=2, capturable=True) == []


def test_update_preconditioners_computes_all_roots_now(device):
    """A step, then the roots: the same as capturable=False, one step later."""
    model, other = mlp(device), mlp(device)
    options = {"lr": 0.1, "betas": (0.0, 0.9), "preconditioner_1d": "full"}
    capturable = torchium.Shampoo(model.parameters(), capturable=True, **options)
    run(model, capturable, 0, 3)
    capturable.update_preconditioners()
    every_step = torchium.Shampoo(other.parameters(), update_freq=1, **options)
    other.load_state_dict(mlp(device).state_dict())
    run(other, every_step, 0, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in every_step.state[q].items():
            if key.startswith(("roots", "statistics")):
                torch.testing.assert_close(capturable.state[p][key], value, rtol=1e-5, atol=1e-6)
    before = values(model)
    run(model, capturable, 3, 1)
    assert not torch.equal(values(model)[0], before[0])


@pytest.mark.parametrize("start", [2, 3])
def test_a_captured_step_starts_to_precondition_when_others_do(start, device):
    p = nn.Parameter(torch.zeros(8, 4, device=device))
    optimizer = torchium.Shampoo(
        [p], lr=1.0, eps=0.1, start_preconditioning_step=start, capturable=True
    )
    roots: list[torch.Tensor] = []
    for t in range(1, start + 2):
        before = p.detach().clone()
        set_gradients([p], t)
        optimizer.step()
        optimizer.update_preconditioners()
        direction = before - p.detach()
        if t < start:
            torch.testing.assert_close(direction, p.grad)
        else:
            expected = roots[0] @ p.grad @ roots[1]
            torch.testing.assert_close(direction, expected, rtol=1e-4, atol=1e-5)
        roots = [optimizer.state[p][f"roots.{mode}"][0].clone() for mode in (0, 1)]


def test_roots_before_the_first_step_that_counts_are_those_of_the_damping(device):
    """After a skipped step t = 0, where the bias correction 1 - beta^t would give 0 / 0."""
    model = mlp(device)
    optimizer = torchium.Shampoo(model.parameters(), betas=(0.0, 0.9), eps=1e-4)
    set_gradients(model.parameters(), 0)
    model[0].weight.grad[0, 0] = torch.nan
    optimizer.step()
    optimizer.update_preconditioners()
    state = optimizer.state[model[0].weight]
    assert state["step"] == 0
    for mode, n in enumerate((5, 6)):
        assert state[f"root_failures.{mode}"].tolist() == [0]
        expected = 10.0 * torch.eye(n, device=device)  # (1e-4)^(-1/4)
        torch.testing.assert_close(state[f"roots.{mode}"][0], expected, rtol=1e-3, atol=1e-3)


def test_update_preconditioners_without_state_or_after_a_skipped_step_is_harmless():
    model = mlp()
    optimizer = torchium.Shampoo(model.parameters(), betas=(0.0, 0.9))
    optimizer.update_preconditioners()
    set_gradients(model.parameters(), 0)
    model[0].weight.grad[0, 0] = torch.nan
    optimizer.step()
    optimizer.update_preconditioners()
    optimizer.check_errors()
    run(model, optimizer)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_update_preconditioners_raises_for_failing_roots():
    model = mlp()
    optimizer = torchium.Shampoo(model.named_parameters(), capturable=True)
    run(model, optimizer)
    break_statistics(optimizer, model[0].weight)
    optimizer.update_preconditioners()
    optimizer.update_preconditioners()
    with pytest.raises(RuntimeError, match=r"'0.weight' of group 0"):
        optimizer.update_preconditioners()


@pytest.mark.cuda
@pytest.mark.parametrize("when", ["first", "later"])
def test_capture_raises_while_the_host_decides_on_roots(when):
    model = mlp("cuda")
    optimizer = torchium.Shampoo(model.parameters())
    run(model, optimizer, 0, 0 if when == "first" else 3)
    set_gradients(model.parameters(), 9)
    before = values(model)
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert_same(values(model), before)


@pytest.mark.cuda
def test_capture_of_the_roots_raises_while_failures_are_reported():
    model = mlp("cuda")
    optimizer = torchium.Shampoo(model.parameters())
    run(model, optimizer, 0, 2)
    with (
        pytest.raises(RuntimeError, match="capturable=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.update_preconditioners()


@pytest.mark.cuda
@pytest.mark.parametrize("root_method", ["auto", "eigh", "newton"])
def test_captured_roots_equal_eager_ones(root_method):
    models = mlp("cuda"), mlp("cuda")
    optimizers = [
        torchium.Shampoo(m.parameters(), capturable=True, root_method=root_method, momentum=0.9)
        for m in models
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        run(model, optimizer, 0, 2)
        optimizer.update_preconditioners()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].update_preconditioners()
    for step in range(2, 6):
        for model, optimizer in zip(models, optimizers, strict=True):
            run(model, optimizer, step, 1)
        graph.replay()
        optimizers[1].update_preconditioners()
    optimizers[0].check_errors()
    assert_same(values(models[0]), values(models[1]))
    break_statistics(optimizers[0], models[0][0].weight)
    for _ in range(3):
        graph.replay()
    with pytest.raises(RuntimeError, match="root"):
        optimizers[0].check_errors()


@pytest.mark.cuda
def test_captured_step_beside_eager_roots_equals_the_eager_one():
    models = mlp("cuda"), mlp("cuda")
    optimizers = [
        torchium.Shampoo(
            m.parameters(), capturable=True, betas=(0.9, 0.99), grafting="adam", momentum=0.9
        )
        for m in models
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        run(model, optimizer, 0, 2)
        optimizer.update_preconditioners()
    captured, optimizer = models[0], optimizers[0]
    gradients = [p.grad for p in captured.parameters()]
    step_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(step_graph):
        optimizer.step()
    for step in range(2, 8):
        run(models[1], optimizers[1], step, 1)
        for gradient, p in zip(gradients, models[1].parameters(), strict=True):
            gradient.copy_(p.grad)
        step_graph.replay()
        if step % 3 == 0:
            optimizer.update_preconditioners()
            optimizers[1].update_preconditioners()
    optimizer.check_errors()
    torch.testing.assert_close(values(captured), values(models[1]))
    assert optimizer.state[captured[0].weight]["step"] == 8


@pytest.mark.cuda
def test_host_schedule_follows_skipped_steps():
    """Skips reported late must not shift the root schedule permanently."""
    model = mlp("cuda")
    optimizer = torchium.Shampoo(model.parameters(), update_freq=5)
    for step in range(10):
        set_gradients(model.parameters(), step)
        if step % 2:
            model[0].weight.grad[0, 0] = torch.nan
        optimizer.step()
        torch.cuda.synchronize()
    optimizer.check_errors()
    assert optimizer.state[model[0].weight]["step"] == 5
    assert {optimizer._plans.host_steps(p) for p in model.parameters()} == {5}
