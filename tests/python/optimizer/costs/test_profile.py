"""torchium.profile(): costs of phases, from made-up traces and from real steps."""

from __future__ import annotations

import sys

import pytest
import torch
import torchium
from torchium import linalg
from torchium._profile.limits import Limits
from torchium._profile.trace import phase_costs


def event(name, start, length, kind="cpu_op", thread=1, **arguments):
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": start,
        "dur": length,
        "tid": thread,
        "args": arguments,
    }


def operator(name, start, length, *sizes, kind="float", **more):
    types = {"Input Dims": [list(s) for s in sizes], "Input type": [kind] * len(sizes)}
    return event(name, start, length, **types, **more)


def launch(start, correlation, thread=1):
    return event("cudaLaunchKernel", start, 1, "cuda_runtime", thread, correlation=correlation)


def kernel(start, length, correlation):
    return event("some_kernel", start, length, "kernel", 99, correlation=correlation)


def test_time_on_a_cpu_belongs_to_the_innermost_phase():
    costs = phase_costs(
        [
            event("torchium::outer", 0, 100, "user_annotation"),
            operator("aten::mm", 10, 20, (4, 5), (5, 6)),
            event("torchium::inner", 40, 30, "user_annotation"),
            operator("aten::add_", 50, 10, (4, 6), (4, 6), kind="double"),
            event("aten::empty", 200, 7),
        ]
    )
    assert {name: cost.seconds for name, cost in costs.items()} == pytest.approx(
        {"outer": 70e-6, "inner": 30e-6, "other": 7e-6}
    )
    assert costs["outer"].flops == 2 * 4 * 5 * 6
    assert costs["outer"].bytes == 4 * (4 * 5 + 5 * 6)
    assert costs["outer"].counted_seconds == pytest.approx(20e-6)
    assert (costs["inner"].flops, costs["inner"].bytes) == (0, 8 * 2 * 24)
    assert costs["inner"].calls == costs["outer"].calls == 1


def test_operators_without_tensors_are_no_phases():
    costs = phase_costs(
        [
            event("torchium::roots", 0, 100),
            event("torchium::wrong_option", 10, 20),
            operator("torchium::matrix_inverse_root", 40, 30, (4, 4)),
        ]
    )
    assert {name: cost.seconds for name, cost in costs.items()} == pytest.approx(
        {"roots": 70e-6, "matrix_inverse_root": 30e-6}
    )


def test_a_call_counts_once_however_often_it_is_dispatched():
    A, b = torch.eye(4), torch.ones(4, 1)
    calls = {
        "svd": lambda: linalg.svd(A),
        "spd_solve": lambda: linalg.spd_solve(A, b),
        "matrix_power": lambda: linalg.matrix_power(A, -0.5),
        "fused_mul_add": lambda: linalg.fused_mul_add(A, A, A),
    }
    with torchium.profile(device="cpu", print_table=False) as profile:
        for call in calls.values():
            call()
        with torch.autocast("cpu", torch.bfloat16):
            linalg.eigh(A)
        for _ in range(2):
            linalg.polar(A)
        with (
            torch.profiler.record_function("torchium::nested"),
            torch.profiler.record_function("torchium::nested"),
        ):
            pass
    found = {phase.name: phase.calls for phase in profile.phases}
    expected = {**dict.fromkeys(calls, 1), "eigh": 1, "polar": 2, "nested": 2}
    assert {name: found[name] for name in expected} == expected


def test_an_operator_counts_once_however_many_it_calls():
    costs = phase_costs(
        [
            event("torchium::phase", 0, 100),
            operator("aten::matmul", 5, 40, (3, 4), (4, 2)),
            operator("aten::mm", 10, 20, (3, 4), (4, 2)),
            operator("aten::resolve_conj", 12, 2, (3, 4)),
            operator("aten::baddbmm_", 50, 20, (7, 3, 2), (7, 3, 4), (7, 4, 2)),
        ]
    )
    assert costs["phase"].flops == 2 * 3 * 4 * 2 * (1 + 7)
    assert costs["phase"].bytes == 4 * ((12 + 8) + 7 * (6 + 12 + 8))


def test_kernels_belong_to_the_range_that_launched_them():
    costs = phase_costs(
        [
            event("torchium::phase", 0, 100),
            launch(5, 1),  # by no operator
            operator("aten::mul_", 20, 10, (8,), (8,), kind="c10::BFloat16"),
            launch(22, 2),
            event("torchium::work", 40, 20, **{"Concrete Inputs": ["1000", "500"]}),
            launch(45, 3),
            launch(45, 4, thread=2),
            kernel(1000, 7, 1),
            kernel(1010, 11, 2),
            kernel(1030, 13, 3),
            kernel(1050, 17, 4),
        ]
    )
    phase = costs["phase"]
    assert phase.seconds == pytest.approx(31e-6)
    assert phase.counted_seconds == pytest.approx(24e-6)
    assert (phase.flops, phase.bytes) == (1000, 500 + 2 * 16)
    assert costs["other"].seconds == pytest.approx(17e-6)
    assert "work" not in costs


def full_matrix_adagrad(params, lr):
    return torchium.Adagrad(params, lr=lr, full_matrix=True)


def steps(optimizer_class, count=2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    x = torch.randn(16, 40)
    for _ in range(count):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("quantity", "phase"),
    [
        ("per_sample_gradients", "sample_rows"),
        ("per_sample_norms", "sample_norms"),
        ("gram", "sample_gram"),
        ("jvp_dots", "sample_dots"),
        ("clip_and_accumulate", "sample_sums"),
    ],
)
def test_per_sample_quantities_are_phases(quantity, phase):
    model = torch.nn.Linear(6, 4)
    last = {"clip_and_accumulate": [1.0], "jvp_dots": [dict(model.named_parameters())]}
    inputs = (torch.randn(5, 6), torch.randint(4, (5,)))
    function = getattr(torchium.gradients, quantity)
    with torchium.profile(device="cpu", print_table=False) as profile:
        function(model, torch.nn.functional.cross_entropy, *inputs, *last.get(quantity, []))
    found = {each.name: each for each in profile.phases}
    assert found[phase].calls == 1
    assert found[phase].seconds > 0


@pytest.mark.parametrize(
    ("optimizer", "phases"),
    [
        (torchium.Shampoo, {"elementwise", "statistics", "roots", "precondition"}),
        (full_matrix_adagrad, {"elementwise", "statistics", "roots", "precondition"}),
        (torchium.KFAC, {"elementwise", "factors", "inverses", "precondition"}),
        (torchium.NaturalGradient, {"elementwise", "gram", "sample_gram", "precondition"}),
    ],
)
def test_a_step_on_a_cpu(optimizer, phases, capsys):
    with torchium.profile(device="cpu") as profile:
        assert profile.phases == ()
        steps(optimizer)
    found = {phase.name: phase for phase in profile.phases}
    assert phases | {"other"} <= set(found)
    assert found["other"].flops > 0  # of the passes
    for phase in profile.phases:
        assert phase.seconds > 0
        assert 0 <= phase.counted <= 1 + 1e-9
        assert phase.bound in ("", "bandwidth", "arithmetic")
        assert bool(phase.bound) == (phase.bytes + phase.flops > 0)
    assert capsys.readouterr().out.strip() == str(profile)
    assert str(profile).splitlines()[0].split()[:2] == ["phase", "calls"]


def test_flops_of_the_products_of_a_step():
    """Two linear layers: forward, and the gradients of weights and of the inner input."""
    with torchium.profile(device="cpu", print_table=False) as profile:
        steps(torchium.Adagrad, count=3)
    (other,) = [phase for phase in profile.phases if phase.name == "other"]
    first, second = 2 * 16 * 40 * 30, 2 * 16 * 30 * 5
    assert other.flops == 3 * (2 * first + 3 * second)


def test_limits_are_rates_of_this_machine():
    with torchium.profile(device="cpu", print_table=False) as profile:
        pass
    assert isinstance(profile.limits, Limits)
    assert 1e8 < profile.limits.bandwidth < 1e13
    assert 1e8 < profile.limits.flops < 1e15


def test_a_roofline_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    with torchium.profile(path, device="cpu", print_table=False):
        steps(torchium.Shampoo)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_roofline_that_cannot_be_drawn_runs_nothing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = []
    with (
        pytest.raises(ImportError, match="pip install matplotlib"),
        torchium.profile(tmp_path / "roofline.png", device="cpu"),
    ):
        ran.append(1)
    assert not ran
    with pytest.raises(ValueError, match="roofline is 3"), torchium.profile(3, device="cpu"):
        ran.append(1)
    assert not ran
    with torchium.profile(device="cpu", print_table=False):
        ran.append(1)
    assert ran


@pytest.mark.parametrize("outer", ["torch", "torchium"])
def test_a_second_profiler_is_refused_before_anything_runs(outer):
    device = {"device": "cpu", "print_table": False}
    first = torch.profiler.profile() if outer == "torch" else torchium.profile(**device)
    ran = []
    message = "another profiler of torch is running"
    with first, pytest.raises(RuntimeError, match=message), torchium.profile(**device):
        ran.append(1)
    assert not ran
    with torchium.profile(**device) as profile, torch.profiler.record_function("torchium::x"):
        torch.ones(9).sum()
    assert [phase.name for phase in profile.phases] == ["x"]


LINEAR_ALGEBRA = {
    "lanczos": lambda A, b: linalg.lanczos(A, 2),
    "arnoldi": lambda A, b: linalg.arnoldi(A, 2),
    "hutchinson_trace": lambda A, b: linalg.hutchinson_trace(A),
    "hutchinson_diagonal": lambda A, b: linalg.hutchinson_diagonal(A),
    "hutchpp": lambda A, b: linalg.hutchpp(A),
    "xdiag": lambda A, b: linalg.xdiag(A),
    "logdet": lambda A, b: linalg.logdet(A),
    "cg": linalg.cg,
    "gmres": linalg.gmres,
    "solve": lambda A, b: A.solve(b),
    "exp": lambda A, b: A.exp() @ b,
}


def test_algorithms_of_linear_algebra_are_phases():
    """With the products of an operator that is known by its structure."""
    A = linalg.Dense(torch.eye(200)) + linalg.Diagonal(torch.linspace(0, 1, 200))
    A, b = A.assume("positive_definite"), torch.ones(200)
    with torchium.profile(device="cpu", print_table=False) as profile:
        for function in LINEAR_ALGEBRA.values():
            function(A, b)
    found = {phase.name: phase for phase in profile.phases}
    assert {name: found[name].calls for name in LINEAR_ALGEBRA} == dict.fromkeys(LINEAR_ALGEBRA, 1)
    named = sum(found[name].seconds for name in LINEAR_ALGEBRA)
    assert named > 0.8 * sum(phase.seconds for phase in profile.phases)


@pytest.mark.parametrize("path", [3, "no-folder/roofline.png"])
def test_a_picture_needs_a_folder(path):
    message = r"profile: roofline is .*; it must be a path in an existing folder"
    with pytest.raises(ValueError, match=message):
        torchium.profile(path, device="cpu").__enter__()


def test_an_error_of_the_block_passes(capsys):
    with pytest.raises(ZeroDivisionError), torchium.profile(device="cpu") as profile:
        1 / 0  # noqa: B018
    assert profile.phases == ()
    assert str(profile) == "torchium.profile: nothing was measured"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_device_that_cannot_be_measured(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with (
        pytest.raises(ValueError, match=rf"profile: device is {device}"),
        torchium.profile(device=device),
    ):
        pass


@pytest.mark.cuda
def test_phases_of_a_step_on_cuda():
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torchium.Shampoo(model.parameters(), lr=0.01)
    x = torch.randn(64, 1024, device="cuda")

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    with torchium.profile() as profile:
        step()
    found = {phase.name: phase for phase in profile.phases}
    assert {"elementwise", "statistics", "precondition"} <= set(found)
    for name in ("statistics", "precondition"):
        phase = found[name]
        assert phase.limit > 0
        # No device does more. The measured limits are lower while other processes use it.
        assert 0 < phase.flops / phase.seconds < 4e15
        assert 0 < phase.bytes / phase.seconds < 2e13


@pytest.mark.cuda
def test_a_split_product_announces_its_arithmetic():
    A = torch.randn(2048, 2048, device="cuda")
    torchium.linalg.chunked_matmul(A, A)
    with torchium.profile() as profile:
        torchium.linalg.chunked_matmul(A, A)
    found = {phase.name: phase for phase in profile.phases}["chunked_matmul"]
    assert found.flops >= 2 * 2048**3
    assert found.counted > 0.5
