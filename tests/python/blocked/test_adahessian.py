"""torchium.AdaHessian against the paper's formulas with the Hessian as a matrix, in both languages."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
import torchium
from optimizer_cases import assert_same
from reference import ReferenceAdaHessian
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def cpp():
    return pytest.importorskip("torchium_cpp._C", exc_type=ImportError).optim.AdaHessian


OPTIONS = [
    {},
    {"lr": 0.05, "betas": (0.5, 0.9)},
    {"eps": 0.1, "weight_decay": 0.1},
    {"hessian_power": 0.5},
    {"hessian_power": 0.0, "lr": 0.01},
    {"update_each": 3},
    {"n_samples": 3},
    {"n_samples": 2, "update_each": 2, "weight_decay": 0.02, "lr": 0.03},
]


def make_model(dtype: torch.dtype = torch.float64, device: str = "cpu") -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        *(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))
    )
    return model.to(device, dtype)


def batch(step: int, dtype: torch.dtype = torch.float64, device: str = "cpu"):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 2, 3, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (8,), generator=generator)
    return x.to(device, dtype), y.to(device)


def drawn_signs(params: list[Tensor], samples: int) -> list[list[Tensor]]:
    """The signs of the next estimate; leaves the generator as it was."""
    with torch.random.fork_rng():
        seed = int(torch.randint(torch.iinfo(torch.int64).max, (1,)))
    return [
        [
            torch.ops.torchium.random_signs(
                *(p.numel(), 1, seed, samples * i + s), p.dtype, p.device
            ).view(p.shape)
            for i, p in enumerate(params)
        ]
        for s in range(samples)
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_trajectory_is_that_of_the_reference(options):
    model, copied = make_model(), make_model()
    params = list(copied.parameters())
    rest = {key: value for key, value in options.items() if key != "n_samples"}
    reference = ReferenceAdaHessian(params, **rest)
    optimizer = torchium.AdaHessian(model.parameters(), **options)
    for step in range(7):
        x, y = batch(step)
        is_due = step % options.get("update_each", 1) == 0
        signs = drawn_signs(params, options.get("n_samples", 1)) if is_due else []
        reference.step(lambda: F.cross_entropy(copied(x), y), signs)  # noqa: B023
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward(create_graph=is_due)
        optimizer.step()
    torch.testing.assert_close(list(model.parameters()), params, rtol=1e-9, atol=1e-11)


def train(optimizer, model: nn.Module, steps: range, dtype: torch.dtype = torch.float64) -> None:
    for step in steps:
        x, y = batch(step, dtype, next(model.parameters()).device.type)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward(create_graph=True)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cpp_steps_alike_bit_for_bit(options, dtype, cpp):
    ours, theirs = make_model(dtype), make_model(dtype)
    optimizer = torchium.AdaHessian(ours.parameters(), **options)
    other = cpp(list(theirs.parameters()), **options)
    for each, model in ((optimizer, ours), (other, theirs)):
        torch.manual_seed(3)
        train(each, model, range(5), dtype)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_same(p, q)
        assert_same(dict(optimizer.state[p]), dict(other.state(q)))


def test_cpp_continues_from_an_archive(tmp_path, cpp):
    model, copied = make_model(), make_model()
    first = cpp(list(model.parameters()), n_samples=2)
    train(first, model, range(3))
    first.save(str(tmp_path / "optimizer.pt"))
    copied.load_state_dict(model.state_dict())
    second = cpp(list(copied.parameters()))
    second.load(str(tmp_path / "optimizer.pt"))
    for each, of in ((first, model), (second, copied)):
        torch.manual_seed(4)
        train(each, of, range(3, 6))
    assert_same(list(model.parameters()), list(copied.parameters()))


def test_a_diagonal_hessian_is_found_exactly():
    curvature = torch.tensor([0.5, 2.0, 7.0], dtype=torch.float64)
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torchium.AdaHessian([p])
    (curvature * p.square() / 2).sum().backward(create_graph=True)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["hessian_diagonal"], curvature)


def test_groups_share_one_estimate_and_keep_their_options():
    together, apart = make_model(), make_model()
    whole = torchium.AdaHessian(together.parameters(), lr=0.1)
    params = list(apart.parameters())
    parts = torchium.AdaHessian(
        [{"params": params[:2]}, {"params": params[2:], "n_samples": 1}], lr=0.1
    )
    for optimizer, model in ((whole, together), (parts, apart)):
        torch.manual_seed(5)
        train(optimizer, model, range(3))
    assert_same(list(together.parameters()), params)
    parts.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    train(parts, apart, range(3, 4))
    assert_same([p.detach() for p in params[:2]], before[:2])
    assert all(not torch.equal(p, q) for p, q in zip(params[2:], before[2:], strict=True))


def test_more_samples_come_closer_to_the_diagonal():
    model = make_model()
    params = list(model.parameters())
    x, y = batch(0)
    _, H = ReferenceAdaHessian(params).hessian(lambda: F.cross_entropy(model(x), y))
    exact = ReferenceAdaHessian.averaged
    sizes = [p.numel() for p in params]
    errors = []
    for samples in (1, 400):
        torch.manual_seed(0)
        optimizer = torchium.AdaHessian(params, lr=0.0, n_samples=samples)
        train(optimizer, model, range(1))
        # |mean| of the entries, then the mean over the kernel
        wanted = [
            exact(d.abs().view(p.shape)) for p, d in zip(params, H.diag().split(sizes), strict=True)
        ]
        found = [optimizer.state[p]["hessian_diagonal"] for p in params]
        errors.append(
            math.sqrt(
                sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True))
            )
        )
    assert errors[1] < 0.2 * errors[0]


# ---- what has no second derivative


def test_gradients_without_a_graph_are_refused_and_nothing_moves():
    model = make_model()
    optimizer = torchium.AdaHessian(model.parameters())
    before = copy.deepcopy(model.state_dict())
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=r"no gradient has a graph.*create_graph=True"):
        optimizer.step()
    assert_same(model.state_dict(), before)
    assert not optimizer.state
    train(optimizer, model, range(2))
    assert all(float(optimizer.state[p]["step"]) == 2 for p in model.parameters())


def test_a_loss_that_is_linear_in_a_parameter_has_no_curvature_there():
    p, q = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizer = torchium.AdaHessian([p, q], lr=0.1, eps=1.0)
    (p.square().sum() + 3 * q.sum()).backward(create_graph=True)
    with pytest.warns(
        UserWarning, match=r"1 of 2 parameters have no graph, the first of shape \[2\]"
    ):
        optimizer.step()
    assert_same(optimizer.state[q]["hessian_diagonal"], torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(q, torch.full_like(q, 1 - 0.1 * 3 / 1.0))


def test_a_reentrant_checkpoint_is_named_once():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torchium.AdaHessian(model.parameters())
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    messages = []
    for _ in range(2):
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], x, use_reentrant=True)
        model[2](hidden).square().mean().backward(create_graph=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        messages += [str(w.message) for w in caught]
    assert len(messages) == 1
    assert "2 of 4 parameters have no graph, the first of shape [4, 3]" in messages[0]
    assert "use_reentrant=False" in messages[0]


def test_gradients_of_zeros_without_a_graph_need_no_warning():
    model = nn.Linear(3, 2)
    unused = nn.Parameter(torch.ones(2))
    unused.grad = torch.zeros(2)
    optimizer = torchium.AdaHessian([*model.parameters(), unused])
    model(torch.randn(5, 3)).square().mean().backward(create_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert unused.eq(1).all()


def test_zero_grad_ends_the_cycle_of_parameters_and_gradients():
    """The docstring has the filter for PyTorch's warning."""
    assert r'message=r"Using backward\(\) with create_graph=True"' in torchium.AdaHessian.__doc__
    model = nn.Linear(3, 2)
    optimizer = torchium.AdaHessian(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        model(torch.randn(5, 3)).square().mean().backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    weight = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_steps_between_two_estimates_need_no_graph():
    model = make_model()
    optimizer = torchium.AdaHessian(model.parameters(), update_each=2)
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward(create_graph=step % 2 == 0)
        optimizer.step()


def test_a_diagonal_that_is_not_finite_skips_the_step():
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torchium.AdaHessian([p], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (p.abs() ** 1.5).sum().backward(create_graph=True)  # a finite slope, infinite curvature
        optimizer.step()
    assert_same(p.detach(), torch.zeros(2, dtype=torch.float64))
    assert_same(optimizer.state[p]["hessian_diagonal"], torch.zeros(2, dtype=torch.float64))
    assert float(optimizer.state[p]["step"]) == 0
    optimizer.zero_grad()
    (p.abs() ** 1.5).sum().backward(create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"in a row.*or a diagonal of the Hessian.*growth_interval"
    ):
        optimizer.step()


# ---- a PyTorch optimizer


def test_frozen_and_late_parameters():
    model = make_model()
    frozen = model[0].weight
    frozen.requires_grad_(False)
    optimizer = torchium.AdaHessian(model.parameters())
    train(optimizer, model, range(2))
    assert frozen not in optimizer.state
    frozen.requires_grad_(True)
    train(optimizer, model, range(2, 4))
    assert float(optimizer.state[frozen]["step"]) == 2
    assert float(optimizer.state[model[0].bias]["step"]) == 4


@pytest.mark.parametrize("in_cpp", [False, True])
@pytest.mark.parametrize("has_graph", [False, True])
def test_a_frozen_parameter_may_keep_a_gradient(has_graph, in_cpp, request):
    """Of zeros, as zero_grad(set_to_none=False) leaves it, or one with a graph."""
    optimizer_type = request.getfixturevalue("cpp") if in_cpp else torchium.AdaHessian
    kept, frozen = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizer = optimizer_type([kept, frozen], lr=0.1)
    (kept * frozen).square().sum().backward(create_graph=True)
    frozen.requires_grad_(False)
    if not has_graph:
        frozen.grad = torch.zeros_like(frozen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if has_graph else "error")
        optimizer.step()
    assert frozen.eq(1).all() != has_graph
    torch.testing.assert_close(kept, torch.full_like(kept, 0.9), rtol=1e-3, atol=0)


def test_a_group_without_gradients_stays(cpp):
    for each in (torchium.AdaHessian, cpp):
        used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = each([{"params": [used]}, {"params": [unused]}])
        for step in range(4):
            optimizer.zero_grad()
            loss = used.pow(4).sum() + (unused.pow(4).sum() if step % 2 == 0 else 0.0)
            loss.backward(create_graph=True)
            before = unused.detach().clone()
            optimizer.step()
            assert torch.equal(unused, before) == (step % 2 == 1)
        assert (used < 1).all()


@pytest.mark.parametrize("through", ["state_dict", "deepcopy"])
def test_a_copy_continues_bit_for_bit(through):
    model = make_model()
    optimizer = torchium.AdaHessian(model.parameters(), update_each=2, n_samples=2)
    train(optimizer, model, range(3))
    if through == "deepcopy":
        other, resumed = copy.deepcopy((model, optimizer))
    else:
        other = copy.deepcopy(model)
        resumed = torchium.AdaHessian(other.parameters())
        resumed.load_state_dict(optimizer.state_dict())
    for each, of in ((optimizer, model), (resumed, other)):
        torch.manual_seed(6)
        train(each, of, range(3, 7))
    assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaled_loss_gives_the_same_steps(unscales):
    plain, scaled = make_model(), make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    torch.manual_seed(7)
    train(torchium.AdaHessian(plain.parameters()), plain, range(3))
    optimizer = torchium.AdaHessian(scaled.parameters(), grad_scaler=scaler if unscales else None)
    torch.manual_seed(7)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(scaled(x), y)).backward(create_graph=True)
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(scaled.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(
        list(plain.parameters()), list(scaled.parameters()), rtol=1e-12, atol=1e-14
    )


def test_unscaled_gradients_of_an_unknown_scaler_are_refused():
    model = make_model()
    optimizer = torchium.AdaHessian(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch(0)
    scaler.scale(F.cross_entropy(model(x), y)).backward(create_graph=True)
    scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="pass grad_scaler=scaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", -1.0, "lr"),
        ("betas", (0.9, 1.0), "betas"),
        ("eps", 0.0, "eps"),
        ("weight_decay", -0.1, "weight_decay"),
        ("hessian_power", 1.5, "hessian_power"),
        ("update_each", 0, "update_each"),
        ("n_samples", 0, "n_samples"),
        ("n_samples", 1.5, "n_samples"),
        ("grad_scaler", 3, "grad_scaler"),
    ],
)
def test_wrong_options_are_named(option, value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        torchium.AdaHessian(make_model().parameters(), **{option: value})


def test_it_trains_a_network_from_its_defaults():
    torch.manual_seed(0)
    model = make_model(torch.float32)
    x, y = batch(0, torch.float32)
    optimizer = torchium.AdaHessian(model.parameters())
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward(create_graph=True)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.cuda
def test_a_gpu_follows_the_cpu():
    models = [make_model(), make_model(device="cuda")]
    for model in models:
        torch.manual_seed(8)
        train(torchium.AdaHessian(model.parameters(), n_samples=2), model, range(4))
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-8, atol=1e-10)


@pytest.mark.cuda
def test_a_step_reads_no_memory_beyond_the_means_over_a_kernel():
    """They are one number per pair of channels, while a gradient has the size of the kernel."""
    layer = nn.Conv2d(2, 2, 64, bias=False, device="cuda")
    inputs = torch.randn(1, 2, 64, 64, device="cuda")
    optimizer = torchium.AdaHessian(layer.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        layer(inputs).square().sum().backward(create_graph=True)
        freed = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 12, 1 << 15, 1 << 17)]
        del freed
        optimizer.step()
    optimizer.zero_grad()
    optimizer.check_errors()
    assert optimizer.state[layer.weight]["step"].item() == 3
