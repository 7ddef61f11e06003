"""Optimizers on a CUDA device: like the CPU, without waiting for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from cuda_waits import no_waits
from optimizer_cases import (
    CASES,
    Make,
    assert_same,
    mlp,
    run,
    set_gradients,
    through_a_file,
    values,
)

pytestmark = pytest.mark.cuda


@pytest.fixture(params=list(CASES))
def make(request: pytest.FixtureRequest) -> Make:
    return CASES[request.param]


def close(actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), e.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-3)])
def test_follows_the_cpu(make: Make, dtype: torch.dtype, tolerance: float) -> None:
    on_cpu, on_cuda = mlp(dtype=dtype), mlp("cuda", dtype)
    expected = run(on_cpu, make(on_cpu.parameters()), steps=10)
    actual = run(on_cuda, make(on_cuda.parameters()), steps=10)
    close(actual, expected, tolerance)


def test_bfloat16_parameters_keep_float32_state(make: Make) -> None:
    model = mlp("cuda", torch.bfloat16)
    optimizer = make(model.parameters())
    assert all(v.isfinite().all() for v in run(model, optimizer, steps=5))
    for state in optimizer.state.values():
        counts = {key for key in state if key == "step" or key.endswith("_start")}
        dtypes = {v.dtype for key, v in state.items() if key not in counts}
        assert dtypes <= {torch.float32, torch.int32}


def test_a_step_does_not_wait(make: Make) -> None:
    model = mlp("cuda")
    roots = {} if make is CASES["adagrad"] else {"update_freq": 1}
    optimizer = make(model.parameters(), **roots)
    run(model, optimizer, steps=2)
    set_gradients(model.parameters(), 2)
    with no_waits() as asleep:
        optimizer.step()
    assert not asleep.query()
    torch.cuda.synchronize()


def test_non_finite_gradients_skip_on_the_device(make: Make) -> None:
    model = mlp("cuda")
    optimizer = make(model.parameters())
    run(model, optimizer, steps=3)
    before = values(model)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    set_gradients(model.parameters(), 7)
    next(iter(model.parameters())).grad[0, 0] = float("nan")
    optimizer.step()
    optimizer.check_errors()
    optimizer.step()
    assert_same(values(model), before)
    assert_same(optimizer.state_dict()["state"], state)

    def third() -> None:
        optimizer.step()  # reports it already if the device is fast
        optimizer.check_errors()

    with pytest.raises(RuntimeError, match="finite"):
        third()
    assert_same(values(model), before)


def test_a_finite_step_ends_the_count(make: Make) -> None:
    model = mlp("cuda")
    optimizer = make(model.parameters())
    for step in range(6):
        set_gradients(model.parameters(), step)
        if step % 3:
            next(iter(model.parameters())).grad.fill_(float("inf"))
        optimizer.step()
        optimizer.check_errors()
    assert all(s["step"].item() == 2 for s in optimizer.state.values())


def test_checkpoints_move_between_devices(make: Make) -> None:
    on_cuda = mlp("cuda", torch.float64)
    first = make(on_cuda.parameters())
    run(on_cuda, first, steps=3)
    saved = {"model": on_cuda.state_dict(), "optimizer": first.state_dict()}
    checkpoint = through_a_file(saved, map_location="cpu")
    on_cpu = mlp(dtype=torch.float64)
    on_cpu.load_state_dict(checkpoint["model"])
    second = make(on_cpu.parameters())
    second.load_state_dict(checkpoint["optimizer"])
    again = mlp("cuda", torch.float64)
    again.load_state_dict(checkpoint["model"])
    third = make(again.parameters())
    third.load_state_dict(second.state_dict())
    expected = run(on_cuda, first, first=3)
    assert_same(run(again, third, first=3), expected)
    close(run(on_cpu, second, first=3), [v.cpu() for v in expected], 1e-8)


def test_a_group_may_span_devices(make: Make) -> None:
    reference, split = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    split[3].to("cuda")
    expected = run(reference, make(reference.parameters()), steps=5)
    close(run(split, make(split.parameters()), steps=5), expected, 1e-9)
