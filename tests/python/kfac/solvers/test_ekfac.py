"""torchium.KFAC with ekfac=True, against dense Fisher matrices, the float64 reference and curvlinops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchium
from kfac_problems import (
    BARE,
    assert_close_in_norm,
    assert_each_close_in_norm,
    make_model,
    mlp,
    random,
    train_reference,
    updates,
)
from optimizer_cases import ignore_fallback
from reference import ReferenceEKFAC
from reference.ekfac import dense
from torch import Tensor, nn
from torch.nn import functional as F

EKFAC: dict[str, Any] = {"ekfac": True, "damping_split": "exact"}
OPTIONS: dict[str, dict[str, Any]] = {
    "schedules": {"lr": 0.1, "TCov": 2, "TInv": 3, "stat_decay": 0.6, "kl_clip": 0.01},
    "every_step": {"lr": 0.1, "TCov": 1, "TInv": 1, "weight_decay": 0.01, "damping": 0.1},
    "diagonals": {"lr": 0.1, "TCov": 1, "TInv": 2, "max_factor_size": 5},
    "reduce": {"lr": 0.1, "TCov": 1, "TInv": 3, "weight_sharing": "reduce"},
}


def batch_of(shape: tuple[int, ...], step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Enough samples for factors of full rank, whose eigenvectors are unique up to signs."""
    return random(size, *shape, seed=100 + step), (torch.arange(size) + step) % 3


def pooled_convolutions() -> nn.Module:
    """Groups, dilation, stride and padding, and few inputs to the last layer."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 4, (1, 3), stride=(2, 1), dilation=(1, 2), padding=(1, 0), bias=False),
        nn.Tanh(),
        nn.Conv2d(4, 4, (3, 2), groups=4),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d((1, 2)),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def pooled_deconvolutions() -> nn.Module:
    """Groups, output padding, dilation, stride and padding, and patches of few elements."""
    return nn.Sequential(
        nn.ConvTranspose2d(2, 4, (2, 3), stride=(2, 1), output_padding=(1, 0), groups=2),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 2, (2, 3), dilation=(1, 2), padding=(0, 1), bias=False),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d((1, 2)),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


SMALLER = {
    "convolutions": (pooled_convolutions, (2, 6, 7)),
    "deconvolutions": (pooled_deconvolutions, (2, 3, 4)),
}


def trained_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    if name not in SMALLER:
        return make_model(name)
    make, shape = SMALLER[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make().double(), shape


def layer_state(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in optimizer.state[weight].items()}


def bases_of(state: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The eigenvectors of A and G of each group."""
    return list(zip(state["A_eigenvectors"], state["G_eigenvectors"], strict=True))


@ignore_fallback
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "name",
    ["mlp", "repeated", "tied_head", "sequences", "convolutions", "transposed", "deconvolutions"],
)
def test_training_follows_the_reference(name, options, device):
    model, shape = trained_model(name)
    reference = copy.deepcopy(model)
    train_reference(reference, shape, 6, kind=ReferenceEKFAC, size=16, **OPTIONS[options])
    model.to(device)
    optimizer = torchium.KFAC(model, **OPTIONS[options], **EKFAC)
    for step in range(6):
        x, y = (t.to(device) for t in batch_of(shape, step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_each_close_in_norm(model.parameters(), reference.parameters(), 1e-7)


# Dense Fisher matrices


def networks(name: str) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        models: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
            "linear": (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
            "no_bias": (nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)), (4,)),
            "convolution": (
                nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
                (2, 3, 3),
            ),
            "long_convolution": (  # more positions than channels
                nn.Sequential(nn.Conv2d(1, 2, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3)),
                (1, 9, 9),
            ),
        }  # fmt: skip
    model, shape = models[name]
    return model.double(), random(40, *shape, seed=1)


def sample_gradients(model: nn.Module, x: Tensor, y: Tensor, layer: nn.Module) -> Tensor:
    """d of each sample and group, [N, groups, o * a], by a backward pass for each sample."""
    rows = []
    for i in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        groups = getattr(layer, "groups", 1)
        d = layer.weight.grad.reshape(groups, len(layer.weight) // groups, -1)
        if layer.bias is not None:
            d = torch.cat([d, layer.bias.grad.view(groups, -1, 1)], -1)
        rows.append(d.flatten(1))
    model.zero_grad()
    return torch.stack(rows)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["linear", "no_bias", "convolution", "long_convolution"])
def test_the_closest_diagonal_in_the_eigenbasis(name, sharing, device):
    """s is the diagonal of U^T F U, and so U diag(s) U^T is no further from F than A (x) G."""
    model, x = networks(name)
    y = torch.arange(len(x)) % 3
    layers = [m for m in model if hasattr(m, "weight")]
    fishers = [
        torch.einsum("ngi,ngj->gij", d, d) / len(x)
        for d in (sample_gradients(model, x, y, layer) for layer in layers)
    ]
    model.to(device)
    options = {"TCov": 1, "TInv": 100, "weight_sharing": sharing, "eps": 1e-14}
    optimizer = torchium.KFAC(model, **{**BARE, "lr": 0.0}, **options, **EKFAC)
    for _ in range(2):  # a basis, and moments in it
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    for layer, of_groups in zip(layers, fishers, strict=True):
        state = {key: value.cpu() for key, value in layer_state(optimizer, layer.weight).items()}
        for fisher, A, G, s, basis in zip(
            of_groups, state["A"], state["G"], state["second_moments"], bases_of(state), strict=True
        ):
            U = torch.kron(basis[1], basis[0])
            assert_close_in_norm(s.flatten(), torch.diagonal(U.mT @ fisher @ U), 1e-10)
            distance = (fisher - dense(s, basis)).norm()
            assert distance < 0.999 * (fisher - torch.kron(G, A)).norm()


def test_one_sample_is_the_dense_damped_empirical_fisher(device):
    model, damping = mlp(5, 4, 3).to(device), 1e-2
    x, y = random(1, 5).to(device), torch.tensor([2], device=device)
    optimizer = torchium.KFAC(model, damping=damping, eps=1e-14, TCov=1, **BARE, **EKFAC)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(2):  # a basis, and moments in it
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.param_groups[0]["lr"] = 1.0
    js = [p.grad.clone() for p in model.parameters()]
    for i, p in enumerate(model.parameters()):  # any V: .grad is preconditioned
        p.grad += random(*p.shape, seed=i).to(device)
    V = [p.grad.clone() for p in model.parameters()]
    step = updates(model, optimizer)
    for first in range(0, len(js), 2):
        j, v, d = (torch.cat([t.flatten() for t in ts[first : first + 2]]) for ts in (js, V, step))
        fisher = torch.outer(j, j) + damping * torch.eye(len(j), dtype=j.dtype, device=device)
        assert_close_in_norm(d, torch.linalg.solve(fisher, v), 1e-8)


def test_ggn_moments_are_the_diagonal_of_the_gauss_newton_matrix(device):
    model, x = networks("linear")
    layers = [m for m in model if hasattr(m, "weight")]
    blocks = []
    for layer in layers:
        total: Any = 0.0
        for sample in x:
            f = model(sample)
            p = f.detach().softmax(-1)
            rows = []
            for k in range(len(f)):
                grads = torch.autograd.grad(f[k], [layer.weight, layer.bias], retain_graph=True)
                rows.append(torch.cat([grads[0], grads[1].unsqueeze(1)], 1).flatten())
            J = torch.stack(rows)
            total = total + J.mT @ (torch.diag(p) - torch.outer(p, p)) @ J / len(x)
        blocks.append(total)
    model.to(device)
    options = {"TCov": 1, "TInv": 100, "fisher": "ggn"}
    optimizer = torchium.KFAC(model, **{**BARE, "lr": 0.0}, **options, **EKFAC)
    for _ in range(2):
        optimizer.zero_grad()
        outputs = model(x.to(device))
        optimizer.update_curvature(outputs, "cross_entropy")
        outputs.sum().backward()
        optimizer.step()
    for layer, block in zip(layers, blocks, strict=True):
        state = {key: value.cpu() for key, value in layer_state(optimizer, layer.weight).items()}
        (basis,) = bases_of(state)
        U = torch.kron(basis[1], basis[0])
        expected = torch.diagonal(U.mT @ block @ U)
        assert_close_in_norm(state["second_moments"].flatten(), expected, 1e-10)


@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_directions_agree_with_curvlinops(name):
    curvlinops = pytest.importorskip("curvlinops")
    model, x = networks(name)
    if name == "convolution":  # curvlinops has no groups
        model[0] = nn.Conv2d(2, 4, 2).double()
    y = torch.arange(len(x)) % 3
    params = list(model.parameters())
    ekfac = curvlinops.EKFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        params,
        [(x, y)],
        fisher_type="empirical",
        kfac_approx="expand",
        separate_weight_and_bias=False,
    )
    damping = 0.01
    inverse = curvlinops.KFACInverseLinearOperator(ekfac, damping=damping, use_exact_damping=True)
    options = {"damping": damping, "eps": 1e-14, "TCov": 1, "TInv": 100}
    optimizer = torchium.KFAC(model, **{**BARE, "lr": 0.0}, **options, **EKFAC)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    expected = inverse @ [p.grad for p in params]
    assert_each_close_in_norm(updates(model, optimizer), expected, 1e-6)


# Averages


def run(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_a_new_basis_keeps_the_sum_of_the_moments(device):
    """The trace of the matrix; the change of basis maps it alone."""
    model = mlp(4, 6, 3).to(device)
    optimizer = torchium.KFAC(model, lr=0.1, TCov=2, TInv=1, **EKFAC)
    weight = next(iter(model.parameters()))
    for step in range(3):
        run(model, optimizer, *(t.to(device) for t in batch_of((4,), step)))
    before = layer_state(optimizer, weight)
    with torch.no_grad():  # another basis at the next step, which has no new factors
        B = random(5, 5).to(device)
        optimizer.state[weight]["A"].copy_(B @ B.mT)
    run(model, optimizer, *(t.to(device) for t in batch_of((4,), 3)))
    after = layer_state(optimizer, weight)
    torch.testing.assert_close(after["second_moments"].sum(), before["second_moments"].sum())
    assert (after["second_moments"] - before["second_moments"]).norm() > 0.01 * before[
        "second_moments"
    ].norm()


@ignore_fallback
@pytest.mark.parametrize("name", ["mlp", "tied_head", "convolutions", "sequences"])
def test_micro_batches_and_sums_equal_one_mean(name, device):
    results = []
    for sizes, averaged in [((16,), True), ((3, 8, 5), True), ((16,), False)]:
        model, shape = trained_model(name)
        model.to(device)
        scale = 1.0 if averaged else 1 / 16
        options = {"TCov": 1, "TInv": 2, "kl_clip": None, "batch_averaged": averaged}
        optimizer = torchium.KFAC(model, lr=0.1 * scale, **options, **EKFAC)
        for step in range(4):
            x, y = (t.to(device) for t in batch_of(shape, step))
            optimizer.zero_grad()
            for part_x, part_y in zip(x.split(sizes), y.split(sizes), strict=True):
                loss = F.cross_entropy(model(part_x), part_y, reduction="sum")
                (loss / 16 if averaged else loss).backward()
            optimizer.step()
        moments = [s["second_moments"] for s in optimizer.state.values() if "A" in s]
        results.append([*moments, *(p.detach() for p in model.parameters())])
    for other in results[1:]:
        assert_each_close_in_norm(results[0], other, 1e-8)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_loss_scale_cancels(unscale, device):
    results = []
    for enabled in (False, True):
        model = mlp(4, 6, 3).to(device)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=enabled)
        optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=2, grad_scaler=scaler, **EKFAC)
        for step in range(4):
            x, y = (t.to(device) for t in batch_of((4,), step))
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach() for p in model.parameters()])
    assert_each_close_in_norm(*results, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_float64(dtype, device):
    moments = []
    for kind in (torch.float64, dtype):
        model = mlp(6, 8, 3).to(device, kind)
        options = {"TCov": 1, "TInv": 100}
        optimizer = torchium.KFAC(model, **{**BARE, "lr": 0.0}, **options, **EKFAC)
        for _ in range(2):
            x, y = (t.to(device) for t in batch_of((6,), 0, 64))
            run(model, optimizer, x.to(torch.bfloat16).to(kind), y)
        moments.append([s["second_moments"].double() for s in optimizer.state.values() if "A" in s])
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    for exact, rounded in zip(*moments, strict=True):
        assert abs(rounded.sum() / exact.sum() - 1) < tolerance
        assert (rounded - exact).norm() < 10 * tolerance * exact.norm()


# Steps that go wrong, and changes


def test_a_skipped_step_leaves_the_moments(device):
    model = mlp(4, 6, 3).to(device)
    optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=1, **EKFAC)
    weight = next(iter(model.parameters()))
    for step in range(2):
        run(model, optimizer, *(t.to(device) for t in batch_of((4,), step)))
    before = layer_state(optimizer, weight)
    x, y = (t.to(device) for t in batch_of((4,), 3))
    run(model, optimizer, x * float("nan"), y)
    after = layer_state(optimizer, weight)
    assert torch.equal(before["second_moments"], after["second_moments"])
    assert torch.equal(before["moment_updates"], after["moment_updates"])
    run(model, optimizer, x, y)
    assert layer_state(optimizer, weight)["moment_updates"] == before["moment_updates"] + 1


def test_moments_too_large_for_the_dtype_skip_the_step(device):
    """Gradients of samples that cancel in the batch: only their squares overflow."""
    layer = nn.Linear(2, 2, bias=False).to(device)
    optimizer = torchium.KFAC(layer, lr=0.1, TCov=1, TInv=100, **EKFAC)
    signs = torch.tensor([1.0, -1.0], device=device).unsqueeze(1)
    for size in (1.0, 1e11):
        x = torch.full((2, 2), size, device=device)
        optimizer.zero_grad()
        (layer(x) * signs * size).sum().backward()
        optimizer.step()
    state = layer_state(optimizer, layer.weight)
    assert state["step"] == 1
    assert all(value.isfinite().all() for value in state.values())


def test_a_rejected_eigensystem_leaves_the_moments(device):
    model = mlp(4, 6, 3).to(device)
    optimizer = torchium.KFAC(model, lr=0.1, TCov=2, TInv=1, **EKFAC)
    weight = next(iter(model.parameters()))
    for step in range(3):
        run(model, optimizer, *(t.to(device) for t in batch_of((4,), step)))
    before = layer_state(optimizer, weight)
    optimizer.state[weight]["A"].fill_(float("nan"))
    run(model, optimizer, *(t.to(device) for t in batch_of((4,), 3)))
    after = layer_state(optimizer, weight)
    assert after["root_failures"].tolist() == [1, 0]
    for key in ("second_moments", "A_eigenvectors", "G_eigenvectors"):
        assert torch.equal(before[key], after[key])


def test_ekfac_may_be_switched_on_and_off(device):
    model = mlp(4, 6, 3).to(device)
    optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=100, damping_split="exact")
    weight = next(iter(model.parameters()))
    run(model, optimizer, *(t.to(device) for t in batch_of((4,), 0)))
    assert "second_moments" not in optimizer.state[weight]
    optimizer.param_groups[0]["ekfac"] = True
    x, y = (t.to(device) for t in batch_of((4,), 1))
    run(model, optimizer, x, y)
    state = layer_state(optimizer, weight)
    products = state["G_eigenvalues"].unsqueeze(-1) * state["A_eigenvalues"].unsqueeze(-2)
    torch.testing.assert_close(state["second_moments"], products)
    assert state["moment_updates"] == 0  # the basis of the moments is known from here on
    run(model, optimizer, x, y)
    assert layer_state(optimizer, weight)["moment_updates"] == 1
    optimizer.param_groups[0]["ekfac"] = False
    run(model, optimizer, x, y)
    assert "second_moments" not in optimizer.state[weight]


def test_ekfac_needs_eigenvectors():
    message = "ekfac=True needs eigenvectors; use damping_split='exact', got 'pi'"
    with pytest.raises(ValueError, match=message):
        torchium.KFAC(mlp(4, 3), ekfac=True)
    with pytest.raises(ValueError, match=message):
        torchium.KFACPreconditioner(mlp(4, 3), ekfac=True)


def test_the_preconditioner_has_the_same_directions(device):
    first, second = mlp(4, 6, 3).to(device), mlp(4, 6, 3).to(device)
    kfac = torchium.KFAC(first, lr=0.1, momentum=0.0, TCov=1, TInv=2, **EKFAC)
    preconditioner = torchium.KFACPreconditioner(
        second, lr=0.1, factor_update_steps=1, inv_update_steps=2, **EKFAC
    )
    sgd = torch.optim.SGD(second.parameters(), lr=0.1)
    for step in range(4):
        x, y = (t.to(device) for t in batch_of((4,), step))
        run(first, kfac, x, y)
        sgd.zero_grad()
        F.cross_entropy(second(x), y).backward()
        preconditioner.step()
        sgd.step()
    torch.testing.assert_close(list(first.parameters()), list(second.parameters()))
