"""Shampoo's fused step on a CUDA device, against the same steps in float64 on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torchium
from cuda_launches import launches
from torch import Tensor, nn

pytestmark = pytest.mark.cuda

# Blocks whole and cut in each dimension, one column wide, sizes that are not multiples of four, orders zero
# to three, convolutions.
SHAPES = [
    (24, 40), (7, 5), (33, 70), (64, 64), (3, 129), (1, 9), (11, 1), (), (1,), (37,), (64,), (200,),
    (8, 3, 3, 3), (16, 8, 1, 1), (1, 8, 3, 3), (20, 30, 40), (0,),
]  # fmt: skip
# A large eps: roots of rounded statistics must not differ more than the steps may.
BASE = {"lr": 0.05, "eps": 0.3, "update_freq": 2, "block_size": 32}
OPTIONS = {
    "plain": {},
    "averages": {"betas": (0.9, 0.95), "momentum": 0.9, "decoupled_weight_decay": True}
    | {"weight_decay": 0.1, "grafting": "adam"},
    "nesterov": {"betas": (0.5, 0.99), "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    "sgd": {"grafting": "sgd", "maximize": True},
    "adagrad": {"grafting": "adagrad", "betas": (0.8, 1.0), "weight_decay": 0.01},
    "rmsprop": {"grafting": "rmsprop", "grafting_beta2": 0.9, "start_preconditioning_step": 3},
    "late": {"betas": (0.9, 0.99), "start_preconditioning_step": 4},
    "full_vectors": {"preconditioner_1d": "full", "grafting": "adam", "betas": (0.9, 0.99)},
    # Channels-last convolutions: as a vector and as [out in, kh kw], which the kernels cannot read, and [out, in kh kw].
    # The matrix of 387 elements has a rank of at most six: its root depends on rounding without much damping.
    "flattened": {"target_order": 1, "block_size": 512, "preconditioner_1d": "full"}
    | {"grafting": "adam", "betas": (0.9, 0.99), "eps": 3.0},
    "flattened_diagonal": {"target_order": 1, "block_size": 512, "grafting": "sgd"},
    "flattened_adam": {"target_order": 1, "block_size": 512, "preconditioned": False}
    | {"grafting": "adam", "betas": (0.9, 0.99)},
    "merged_rows": {"target_order": 2, "block_size": 24, "grafting": "sgd", "betas": (0.5, 0.9)},
    "merged_columns": {"target_order": 2, "block_size": 32, "momentum": 0.5},
    "as_given": {"target_order": 0, "preconditioner_1d": "full", "grafting": "sgd"},
    "unpreconditioned": {"preconditioned": False, "grafting": "sgd", "betas": (0.9, 0.95)},
    "unpreconditioned_adam": {"preconditioned": False, "grafting": "adam", "betas": (0.9, 0.95)}
    | {"momentum": 0.5, "weight_decay": 0.1},
    "limit": {"max_preconditioned_dim": 39, "grafting": "adam", "betas": (0.9, 0.95)},
    "limit_plain": {"max_preconditioned_dim": 39, "momentum": 0.5},
    "blocks_of_one": {"block_size": 1, "grafting": "sgd", "betas": (0.0, 0.9)},
    "whole": {"block_size": 512, "relative_eps": 1e-6, "betas": (0.9, 0.99)},
}


def parameters(device: str, dtype: torch.dtype, channels_last: bool = False) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    if channels_last:
        values = [v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for v in values]
    return [nn.Parameter(v) for v in values]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    """The same rounded numbers for every device and dtype, of different magnitudes per parameter."""
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=generator).bfloat16() * 2.0 ** (i % 5 - 3)
        p.grad = torch.empty_like(p).copy_(gradient)


def trajectory(params: list[nn.Parameter], steps: int, **options: object) -> list[Tensor]:
    optimizer = torchium.Shampoo(params, **{**BASE, **options})
    for seed in range(steps):
        give_gradients(params, seed)
        if seed == 2:
            params[3].grad = params[9].grad = None
        optimizer.step()
    optimizer.check_errors()
    return [p.detach().cpu().double() for p in params]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_follows_float64_on_the_cpu(options: dict[str, object], channels_last: bool) -> None:
    start = [p.detach().double() for p in parameters("cpu", torch.float64)]
    expected = trajectory(parameters("cpu", torch.float64, channels_last), 6, **options)
    actual = trajectory(parameters("cuda", torch.float32, channels_last), 6, **options)
    for shape, s, a, e in zip(SHAPES, start, actual, expected, strict=True):
        moved = (e - s).norm()
        assert (a - e).norm() <= 2e-4 * moved + 1e-6, (shape, (a - e).norm(), moved)


# Products of blocks whose sizes are not multiples of 8 are float32 or TF32, others split fp16.
@pytest.mark.parametrize(
    ("shape", "precision", "low", "high"),
    [
        ((190, 150), "highest", 0.0, 3e-6),
        ((190, 150), "high", 3e-5, 1e-3),
        ((192, 160), "highest", 0.0, 3e-6),
        ((192, 160), "high", 3e-5, 1e-3),
        ((1024, 1024), "highest", 0.0, 1e-5),
        ((1024, 1024), "high", 3e-5, 1e-3),
    ],
)
def test_precision_of_products(
    shape: tuple[int, int], precision: str, low: float, high: float
) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(shape, device="cuda"))
    g = torch.randn(2, *shape)
    optimizer = torchium.Shampoo(
        [p], lr=1.0, eps=1e-2, betas=(0.0, 0.9), matmul_precision=precision
    )
    p.grad = g[0].cuda()
    optimizer.step()
    state = {key: value.cpu().double() for key, value in optimizer.state[p].items()}
    for mode, factor in enumerate((g[0], g[0].T)):
        expected = 0.1 * factor.double() @ factor.double().T
        error = (state[f"statistics.{mode}"][0] - expected).norm() / expected.norm()
        assert low / 4 <= error < high
    optimizer.param_groups[0]["update_freq"] = 1000
    optimizer.state[p]["step"].fill_(8)  # no root is due at step 9
    optimizer.load_state_dict(optimizer.state_dict())  # the host counts too
    before = p.detach().cpu().double()
    p.grad = g[1].cuda()
    optimizer.step()
    expected = state["roots.0"][0] @ g[1].double() @ state["roots.1"][0]
    error = (before - p.detach().cpu().double() - expected).norm() / expected.norm()
    assert low <= error < high


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_skipped_step_of_fp16_parts_changes_no_bit(precision: str) -> None:
    p = nn.Parameter(torch.randn(1024, 1024, device="cuda"))
    options = {**BASE, **OPTIONS["averages"], "block_size": 1024}
    optimizer = torchium.Shampoo([p], matmul_precision=precision, **options)
    for _ in range(2):
        p.grad = torch.randn_like(p)
        optimizer.step()
    before = p.detach().clone()
    state = {key: value.clone() for key, value in optimizer.state[p].items()}
    p.grad = torch.randn_like(p)
    p.grad[500, 700] = float("nan")
    optimizer.step()
    optimizer.check_errors()
    assert torch.equal(p, before)
    for key, value in optimizer.state[p].items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("betas", [(0.0, 1.0), (0.9, 0.99)])
def test_a_tiny_gradient_beside_a_huge_one_keeps_its_digits(
    betas: tuple[float, float], precision: str
) -> None:
    """Both are in the same buffers of hi and lo parts."""
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        params = [nn.Parameter(torch.zeros(24, 64, device=device, dtype=dtype)) for _ in range(3)]
        optimizer = torchium.Shampoo(
            params,
            lr=1.0,
            eps=0.0,
            relative_eps=0.05,
            betas=betas,
            root_method="eigh",
            matmul_precision=precision,
        )
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            for p, size in zip(params, (1e-12, 1e3, 1.0), strict=True):
                gradient = size * torch.randn(p.shape, generator=generator)
                p.grad = gradient.to(device, dtype)
            optimizer.step()
        optimizer.check_errors()
        results.append([p.detach().cpu().double() for p in params])
    tolerance = 1e-4 if precision == "highest" else 5e-3
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("size", [1e-15, 1e-16, 1e-17, 1e-18])
@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 3e-6), ("high", 1e-3)])
def test_statistics_of_tiny_gradients_keep_their_digits(
    size: float, precision: str, tolerance: float
) -> None:
    """Squares down to 1e-36 are normal numbers of float32."""
    p = nn.Parameter(torch.zeros(192, 160, device="cuda"))
    optimizer = torchium.Shampoo([p], betas=(0.0, 0.9), matmul_precision=precision)
    g = size * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    p.grad = g.cuda()
    optimizer.step()
    for mode, factor in enumerate((g.double(), g.T.double())):
        expected = 0.1 * factor @ factor.T
        actual = optimizer.state[p][f"statistics.{mode}"][0].cpu().double()
        assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters(dtype: torch.dtype) -> None:
    options = OPTIONS["averages"]
    reference = trajectory(parameters("cpu", torch.float64), 4, **options)
    start = [p.detach().double() for p in parameters("cpu", torch.float64)]
    params = parameters("cuda", dtype)
    actual = trajectory(params, 4, **options)
    for p, s, a, e in zip(params, start, actual, reference, strict=True):
        rounding = torch.finfo(dtype).eps * (s.norm() + e.norm()) * 2
        assert (a - e).norm() <= 0.05 * (e - s).norm() + rounding, p.shape


def test_gradients_of_another_dtype() -> None:
    a, b = (nn.Parameter(torch.ones(40, 24, device="cuda")) for _ in range(2))
    b.data = b.data.to(torch.bfloat16)
    for p in (a, b):
        p.grad = torch.linspace(-1, 1, 960, device="cuda").view(40, 24).to(p.dtype)
        torchium.Shampoo([p], lr=0.1).step()
    torch.testing.assert_close(a.data, b.data.float(), rtol=2e-2, atol=1e-2)


def test_more_parameters_than_a_table_holds() -> None:
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(3)
        shapes = [(3 + i % 5, 4 + i % 3) if i % 4 else (5 + i % 7,) for i in range(1500)]
        params = [nn.Parameter(torch.randn(s).to(device, dtype)) for s in shapes]
        optimizer = torchium.Shampoo(params, lr=0.1, eps=1e-2, update_freq=2, grafting="sgd")
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape).to(device, dtype)
            optimizer.step()
        optimizer.check_errors()
        return [p.detach().cpu().double() for p in params]

    torch.testing.assert_close(
        run("cuda", torch.float32), run("cpu", torch.float64), rtol=1e-3, atol=1e-4
    )


def test_a_gradient_may_be_strided_or_expanded() -> None:
    base = torch.randn(24, 40, dtype=torch.float64)
    for make in (
        lambda x: x.t().contiguous().t(),
        lambda x: x[:1].expand(24, 40),
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
    ):
        results = []
        for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
            p = nn.Parameter(torch.ones(24, 40, device=device, dtype=dtype))
            p.grad = make(base.to(device, dtype))
            torchium.Shampoo([p], lr=0.1, eps=1e-2).step()
            results.append(p.detach().cpu().double())
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("victim", [0, 2, 9, 12, 15])
def test_a_skipped_step_changes_no_bit(value: float, victim: int) -> None:
    params = parameters("cuda", torch.float32)
    options = {**BASE, **OPTIONS["averages"], "update_freq": 1}
    optimizer = torchium.Shampoo(params, **options)
    for seed in range(2):
        give_gradients(params, seed)
        optimizer.step()
    before = [p.detach().clone() for p in params]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    give_gradients(params, 5)
    params[victim].grad.view(-1)[-1] = value
    optimizer.step()
    optimizer.check_errors()
    for p, b in zip(params, before, strict=True):
        assert torch.equal(p, b)
    for i, saved in state.items():
        for key, tensor in saved.items():
            assert torch.equal(optimizer.state_dict()["state"][i][key], tensor), (i, key)


def test_steps_are_bit_identical_and_resume_so() -> None:
    options = OPTIONS["averages"]
    expected = trajectory(parameters("cuda", torch.float32), 6, **options)
    for a, e in zip(
        trajectory(parameters("cuda", torch.float32), 6, **options), expected, strict=True
    ):
        assert torch.equal(a, e)
    params = parameters("cuda", torch.float32)
    optimizer = torchium.Shampoo(params, **{**BASE, **options})
    for seed in range(6):
        if seed == 4:
            saved = copy.deepcopy(optimizer.state_dict())
            params = [nn.Parameter(p.detach().clone()) for p in params]
            optimizer = torchium.Shampoo(params, **BASE)
            optimizer.load_state_dict(saved)
        give_gradients(params, seed)
        if seed == 2:
            params[3].grad = params[9].grad = None
        optimizer.step()
    for p, e in zip(params, expected, strict=True):
        assert torch.equal(p.detach().cpu().double(), e)


def test_a_captured_step_follows_an_eager_one() -> None:
    options = {**BASE, **OPTIONS["averages"], "capturable": True}
    eager, captured = (parameters("cuda", torch.float32) for _ in range(2))
    first, second = (torchium.Shampoo(p, **options) for p in (eager, captured))
    for params, optimizer in ((eager, first), (captured, second)):
        give_gradients(params, 0)
        optimizer.step()
        optimizer.update_preconditioners()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        second.step()
    for seed in range(1, 5):
        give_gradients(eager, seed)
        first.step()
        with torch.no_grad():
            for p, e in zip(captured, eager, strict=True):
                p.grad.copy_(e.grad)
        graph.replay()
        for optimizer in (first, second):
            optimizer.update_preconditioners()
    for p, e in zip(captured, eager, strict=True):
        assert torch.equal(p, e)


def test_launches_do_not_grow_with_the_number_of_parameters() -> None:
    counts = []
    for number in (4, 64):
        params = [nn.Parameter(torch.randn(16, 24, device="cuda")) for _ in range(number)]
        params += [nn.Parameter(torch.randn(24, device="cuda")) for _ in range(number)]
        optimizer = torchium.Shampoo(params, update_freq=100, grafting="adam", betas=(0.9, 0.99))
        for seed in range(8):  # no root is due at step 9
            give_gradients(params, seed)
            optimizer.step()
        counts.append(launches(optimizer))
    assert counts[0] == counts[1] < 20


def test_matrices_of_the_state_may_lie_anywhere() -> None:
    """Other code may put tensors into the state; these begin one element after an aligned one."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(64, 40, device="cuda")) for _ in range(2)]
    optimizers = [torchium.Shampoo([p], matmul_precision="highest") for p in params]
    params[1].data.copy_(params[0])
    for step in range(3):
        gradient = torch.randn_like(params[0])
        for p, optimizer in zip(params, optimizers, strict=True):
            p.grad = gradient
            optimizer.step()
        for key, value in optimizers[1].state[params[1]].items():
            if step == 0 and value.dim() == 3:
                elsewhere = torch.empty(value.numel() + 1, device="cuda")[1:].view_as(value)
                optimizers[1].state[params[1]][key] = elsewhere.copy_(value)
    for key, value in optimizers[0].state[params[0]].items():
        torch.testing.assert_close(optimizers[1].state[params[1]][key], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(params[1], params[0], rtol=1e-5, atol=1e-6)


def blocks_of_shape(x: Tensor, rows: int, columns: int, block_size: int) -> Tensor:
    """[count, rows, columns]: whole blocks, or the remainders at the end."""
    sides = []
    for n, size in ((x.size(0), rows), (x.size(1), columns)):
        whole = n // block_size * block_size
        sides.append(slice(0, whole) if size == block_size else slice(whole, n))
    part = x[sides[0], sides[1]]
    cut = part.view(part.size(0) // rows, rows, part.size(1) // columns, columns)
    return cut.transpose(1, 2).reshape(-1, rows, columns)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("root_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_products_of_many_block_shapes_share_launches(
    precision: str, root_dtype: torch.dtype | None
) -> None:
    """More shapes than one launch supports, and more matrices than are in flight at once."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products of fp16 parts need compute capability 9.0")
    torch.manual_seed(0)
    shapes = [(8 * i, 8 * (41 - i)) for i in range(1, 41)] + [(3080, 2056)]
    params = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
    optimizer = torchium.Shampoo(
        params, lr=1.0, eps=1e-2, betas=(0.0, 0.9), update_freq=1000, block_size=1024,
        matmul_precision=precision, root_dtype=root_dtype,
    )  # fmt: skip
    # New gradients have parts that the roots do not shrink, so rounding is small in comparison.
    for step in range(9):
        for p in params:
            p.grad = torch.randn_like(p)
        if step < 8:
            optimizer.step()
    before = [p.detach().clone() for p in params]
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in params]
    assert launches(optimizer) < 40  # step 9, in which no root is due
    bound = 1e-5 if precision == "highest" else 1e-3
    for p, was, state in zip(params, before, states, strict=True):
        for slot in range(0, sum(key.startswith("roots.") for key in state), 2):
            old = [state[f"statistics.{slot + mode}"].double() for mode in range(2)]
            sizes = [statistics.size(-1) for statistics in old]
            moved, g = (
                blocks_of_shape(x, *sizes, 1024).double() for x in (was - p.detach(), p.grad)
            )
            roots = [state[f"roots.{slot + mode}"].double() for mode in range(2)]
            error = relative_error(moved, roots[0] @ g @ roots[1])
            assert error < bound, (p.shape, sizes, error)
            for mode, side in enumerate((g, g.mT)):
                statistics = optimizer.state[p][f"statistics.{slot + mode}"]
                error = relative_error(statistics, 0.9 * old[mode] + 0.1 * side @ side.mT)
                assert error < bound, (p.shape, sizes, mode, error)
                assert torch.equal(statistics, statistics.mT)


def stepped(parts: list[Tensor], gradients: list[list[Tensor]], which: list[int]) -> list[Tensor]:
    """Values and statistics of some parameters, after steps of these alone."""
    params = [nn.Parameter(parts[i].clone()) for i in which]
    optimizer = torchium.Shampoo(params, **{**BASE, **OPTIONS["averages"]})
    for of_step in gradients:
        for p, i in zip(params, which, strict=True):
            p.grad = of_step[i].clone()
        optimizer.step()
    optimizer.check_errors()
    statistics = [optimizer.state[p][f"statistics.{mode}"] for p in params for mode in (0, 1)]
    return [*(p.detach() for p in params), *statistics]


def assert_near(actual: list[Tensor], expected: list[Tensor], start: list[Tensor]) -> None:
    """Values by how far they have moved, then statistics."""
    moved = [(e - s).norm() for e, s in zip(expected, start, strict=False)]
    sizes = [2e-4 * m for m in moved] + [1e-5 * e.norm() for e in expected[len(start) :]]
    for a, e, size in zip(actual, expected, sizes, strict=True):
        assert (a - e).norm() <= size, (a.shape, (a - e).norm(), size)


def test_a_parameter_does_not_depend_on_its_batch() -> None:
    """Its products have a scale of their own. Those by split_gemm add in a fixed order, cuBLAS chooses by the batch."""
    shapes = [(64, 64), (96, 32), (33, 70), (32, 64)] * 3
    torch.manual_seed(0)
    starts = [torch.randn(shape, device="cuda") for shape in shapes]
    gradients = [
        [torch.randn_like(s) * 2.0 ** (i % 5 - 3) for i, s in enumerate(starts)] for _ in range(4)
    ]
    count = len(shapes)
    together = stepped(starts, gradients, [*range(count)])
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    for i, shape in enumerate(shapes):
        alone = stepped(starts, gradients, [i])
        batched = [together[i], *together[count + 2 * i : count + 2 * i + 2]]
        assert_near(batched, alone, starts[i : i + 1])
        if is_hopper and shape != (33, 70):
            assert all(map(torch.equal, batched[1:], alone[1:])), shape


def test_a_block_does_not_depend_on_its_parameter() -> None:
    """Up to rounding: the scale of its products is that of the parameter."""
    torch.manual_seed(0)
    start = torch.randn(64, 96, device="cuda")
    factors = 2.0 ** -torch.arange(6, device="cuda").view(2, 3)
    spread = factors.repeat_interleave(32, 0).repeat_interleave(32, 1)
    gradients = [torch.randn_like(start) * spread for _ in range(4)]

    def blocks(matrix: Tensor) -> list[Tensor]:
        return [block.contiguous() for rows in matrix.split(32) for block in rows.split(32, 1)]

    whole, *statistics = stepped([start], [[g] for g in gradients], [0])
    parts = stepped(blocks(start), [blocks(g) for g in gradients], [*range(6)])
    of_blocks = [statistics[mode][i : i + 1] for i in range(6) for mode in (0, 1)]
    assert_near(of_blocks, parts[6:], [])
    assert_near(blocks(whole), parts[:6], blocks(start))
