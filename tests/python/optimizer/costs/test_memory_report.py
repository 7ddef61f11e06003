"""memory_report() against the actual tensors; the peak of a step against the state."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torchium
from optimizer_cases import CAPTURING_CASES, give_gradients, mlp, set_gradients
from torch import nn
from torch.profiler import ProfilerActivity, profile

SHAPES = ((40, 24), (24,), (), (16, 8, 3, 3), (40, 24), (7, 1), (6, 5, 4), (0, 3))
CASES = {
    "defaults": {},
    "cut": {"block_size": 16, "merge_dims": False},
    "flattened": {"target_order": 1, "preconditioner_1d": "full"},
    "as_given": {"target_order": 0, "preconditioner_1d": "full", "betas": (0.9, 0.99)},
    "everything": {
        "block_size": 16,
        "betas": (0.9, 0.99),
        "momentum": 0.9,
        "grafting": "adam",
        "preconditioner_1d": "full",
    },
    "sgd": {"grafting": "sgd", "betas": (0.9, 1.0)},
    "limit": {"max_preconditioned_dim": 30, "grafting": "adam", "betas": (0.9, 0.99)},
}
cases = pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]


def stepped(optimizer: torchium.Shampoo) -> torchium.Shampoo:
    set_gradients([p for group in optimizer.param_groups for p in group["params"]], 0)
    optimizer.step()
    return optimizer


COUNTERS = ("step", "exp_avg_start", "grafting_second_moment_start", "root_failures")


def real_bytes(optimizer: torch.optim.Optimizer, *keys: str) -> int:
    tensors = {
        (value.data_ptr(), value.nbytes): value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if not keys or key.split(".")[0] in keys
    }
    return sum(tensors.values())


@cases
@dtypes
def test_is_the_size_of_the_state(options, dtype):
    optimizer = torchium.Shampoo(parameters(dtype), **options)
    planned = optimizer.memory_report()
    assert not optimizer.state
    report = stepped(optimizer).memory_report()
    assert report == planned
    state = report.total.state
    assert state.total == real_bytes(optimizer)
    assert state.statistics == real_bytes(optimizer, "statistics") > 0
    assert state.roots == real_bytes(optimizer, "roots") == state.statistics
    assert state.averages == real_bytes(optimizer, "exp_avg")
    assert state.grafting_second_moments == real_bytes(optimizer, "grafting_second_moment")
    assert state.momentum_buffers == real_bytes(optimizer, "momentum_buffer")
    assert state.diagonals == real_bytes(optimizer, "diagonal")
    assert state.counters == real_bytes(optimizer, *COUNTERS) > 0


OTHERS = {
    "adagrad": (torchium.Adagrad, {}, {"diagonals": ("sum",)}),
    "adagrad_full": (
        torchium.Adagrad,
        {"full_matrix": True, "block_size": 8},
        {"statistics": ("statistics",), "roots": ("roots",)},
    ),
    "adahessian": (
        torchium.AdaHessian,
        {},
        {"averages": ("exp_avg",), "diagonals": ("hessian_diagonal", "exp_hessian_diag_sq")},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@dtypes
def test_counts_future_state(name, dtype):
    cls, options, kinds = OTHERS[name]
    model = mlp(dtype=dtype)
    optimizer = cls(model.parameters(), **options)
    planned = optimizer.memory_report()
    assert not optimizer.state
    model(torch.ones(4, 6, dtype=dtype)).square().mean().backward(create_graph=True)
    optimizer.step()
    model.zero_grad()
    assert optimizer.memory_report() == planned
    state = planned.total.state
    assert state.total == real_bytes(optimizer)
    for kind, keys in kinds.items():
        assert getattr(state, kind) == real_bytes(optimizer, *keys) > 0, kind
    assert state.total == state.counters + sum(getattr(state, kind) for kind in kinds)


FACTORS = {
    "statistics": ("A", "G", "fisher_blocks", "second_moments"),
    "roots": ("A_inverse", "G_inverse", "A_eigenvectors", "G_eigenvectors", "A_eigenvalues",
              "G_eigenvalues", "K", "C"),
    "averages": ("m_K", "m_C"),
    "momentum_buffers": ("momentum_buffer",),
    "batches": ("inputs", "output_gradients", "uses", "use_eps", "use_samples"),
    "counters": ("step", "factor_updates", "moment_updates", "root_failures"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAPTURING_CASES)
def test_counts_state_of_layers_and_kept_batches(name):
    model = mlp()
    optimizer = CAPTURING_CASES[name](model.parameters())
    before = optimizer.memory_report()
    assert before.total.state.total == 0
    assert before.parameters == ()
    for step in range(2):
        give_gradients(model, optimizer, step)
        optimizer.step()
    report = optimizer.memory_report()
    state = report.total.state
    assert state.total == real_bytes(optimizer) == sum(p.state.total for p in report.parameters)
    for kind, keys in FACTORS.items():
        assert getattr(state, kind) == real_bytes(optimizer, *keys), kind
    assert report.total.elements == sum(p.numel() for p in model.parameters())
    assert [p.name for p in report.parameters] == [f"parameter {i} of group 0" for i in range(6)]


def test_counts_what_steps_leave_beside_the_state():
    """The factorisation of a kept batch: [8, 8] with the Gram matrix."""
    model = mlp()
    optimizer = torchium.NaturalGradient(model.parameters(), update_freq=3, solver="gram")
    give_gradients(model, optimizer, 0)
    optimizer.step()
    assert optimizer.memory_report().joint.workspace == 8 * 8 * 8
    assert optimizer.memory_report().groups[0].workspace == 0
    uses = [use for use in torchium.workspace_report() if use.owner == "NaturalGradient"]
    assert 8 * 8 * 8 in [use.scratch_bytes for use in uses]


KERNELS = {
    "kfac": (torchium.KFAC, {}, 0),
    "kfac_inverse_free": (
        torchium.KFAC,
        {"solver": "inverse_free"},
        4 * (7**2 + 5**2 + 6**2 + 3**2),
    ),
    "adagrad": (torchium.Adagrad, {}, 0),
    "shampoo": (torchium.Shampoo, {}, 0),
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", KERNELS)
def test_counts_what_kernels_keep(name):
    """Numbers of the step, and the squares of K and C."""
    cls, options, squares = KERNELS[name]
    model = mlp("cuda")
    optimizer = cls(model.parameters(), **options)
    give_gradients(model, optimizer, 0)
    optimizer.step()
    total = optimizer.memory_report().total
    assert total.workspace > squares
    assert total.graphs == 0


def test_groups_of_optimizers_that_step_all_together():
    model = mlp()
    optimizer = torchium.KFAC(
        [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    )
    give_gradients(model, optimizer, 0)
    optimizer.step()
    report = optimizer.memory_report()
    assert [group.elements for group in report.groups] == [6 * 5 + 5, 5 * 3 + 3]
    # A, G and their inverses
    assert report.groups[1].state.statistics == report.groups[1].state.roots == 4 * (6**2 + 3**2)
    assert [p.group for p in report.parameters] == [0, 0, 1, 1]
    assert report.joint == torchium.optimizers.GroupMemory(0, 0, torchium.optimizers.StateMemory())


def test_shared_tensors_count_once():
    """The input of two layers, which a kept batch has twice."""
    first, second = nn.Linear(6, 3), nn.Linear(6, 3)
    params = [*first.parameters(), *second.parameters()]
    optimizer = torchium.NaturalGradient(params, update_freq=5)
    inputs = torch.randn(8, 6)
    (first(inputs) * second(inputs)).sum(1).mean().backward()
    optimizer.step()
    assert optimizer.memory_report().total.state.total == real_bytes(optimizer)


def test_groups_and_total():
    params = parameters()
    optimizer = torchium.Shampoo(
        [{"params": params[:3]}, {"params": params[3:], "grafting": "adam"}], block_size=16
    )
    first, second = optimizer.memory_report().groups
    total = optimizer.memory_report().total
    assert first.elements == 40 * 24 + 24 + 1
    assert first.parameters == 4 * first.elements
    assert first.state.grafting_second_moments == 0
    assert second.state.grafting_second_moments == second.parameters
    for kind in dataclasses.fields(total.state):
        parts = [getattr(group.state, kind.name) for group in (first, second)]
        assert getattr(total.state, kind.name) == sum(parts), kind.name


def test_counts_parameters_that_have_or_may_get_a_gradient():
    trained, late, frozen = (nn.Parameter(torch.ones(8, 8)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = torchium.Shampoo([trained, late, frozen])
    set_gradients([trained], 0)
    optimizer.step()
    one = torchium.Shampoo([nn.Parameter(torch.ones(8, 8))]).memory_report().total
    total = optimizer.memory_report().total
    assert total.elements == 2 * one.elements
    assert total.state.total == 2 * one.state.total
    trained.requires_grad_(False)  # its state still exists
    assert optimizer.memory_report().total == total


def test_allocates_nothing():
    optimizer = torchium.Shampoo(
        [nn.Parameter(torch.empty(1 << 20, 1 << 11, device="meta"))], max_preconditioned_dim=None
    )
    total = optimizer.memory_report().total
    # 1024 x 2 blocks of 1024 x 1024 with two statistics and two roots each
    assert total.state.statistics == total.state.roots == 1024 * 2 * 2 * 1024 * 1024 * 4


def test_table():
    optimizer = torchium.Shampoo(
        [{"params": [nn.Parameter(torch.ones(20, 10))]}, {"params": [nn.Parameter(torch.ones(5))]}]
    )
    lines = str(optimizer.memory_report()).splitlines()
    assert lines[0].split() == ["bytes", "group", "0", "group", "1", "total"]
    assert lines[2].split() == ["statistics", "2,000", "0", "2,000"]
    kinds = ["statistics", "roots", "diagonals", "counters"]  # others are zero
    assert [line.split()[0] for line in lines[2:-1]] == [*kinds, "state", "workspace", "graphs"]
    assert lines[-1].split() == ["state", "per", "element", "20.1", "5.6", "19.7"]
    assert len({len(line) for line in lines}) == 1
    empty = torchium.Shampoo([nn.Parameter(torch.ones(2), requires_grad=False)]).memory_report()
    assert str(empty).splitlines()[-1].split()[-1] == "-"


def peak_of_a_step(optimizer: torchium.Shampoo) -> int:
    """Peak bytes of a step in addition to those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer.step()
    events = profiler.profiler.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = current = 0
    for _, nbytes in memory:
        current += nbytes
        peak = max(peak, current)
    return peak


MLP = ((512, 784), (512,), (512, 512), (512,), (10, 512), (10,))


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (MLP, {}),
        (MLP, {"block_size": 256, "grafting": "adam", "betas": (0.9, 0.999)}),
        (MLP, {"block_size": 128, "weight_decay": 0.1, "update_freq": 10**6}),
        (MLP, {"root_dtype": torch.bfloat16, "block_size": 256}),
        (((256, 256),) * 4, {"betas": (0.9, 0.99), "grafting": "adam", "root_method": "newton"}),
        (((1 << 14,), (100,)), {"betas": (0.9, 0.99), "grafting": "adam"}),
        (((64, 3, 7, 7), (128, 64, 3, 3), (128,)), {"betas": (0.9, 0.99), "grafting": "adam"}),
    ],
)
def test_peak_of_a_step(shapes, options):
    optimizer = torchium.Shampoo([nn.Parameter(torch.ones(shape)) for shape in shapes], **options)
    stepped(optimizer)
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["update_freq"] = options.get("update_freq", 2)
    set_gradients(params, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each thread solves for a matrix at a time
    try:
        peak = peak_of_a_step(optimizer)
    finally:
        torch.set_num_threads(threads)
    assert 0 < peak <= 2.1 * optimizer.memory_report().total.state.total


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(
    "options",
    [{"grafting": "sgd"}, {"grafting": "adam", "betas": (0.9, 0.99)}],
    ids=["sgd", "adam"],
)
@pytest.mark.parametrize(
    "shapes", [((2048, 2048),) * 4, ((640, 1920),) * 3, ((96, 64),) * 400, MLP], ids=str
)
def test_peak_of_a_step_on_a_gpu(
    shapes: tuple[tuple[int, ...], ...], options: dict[str, object], precision: str
) -> None:
    params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    optimizer = torchium.Shampoo(params, update_freq=1, matmul_precision=precision, **options)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 3 * optimizer.memory_report().total.state.total
