"""K-FAC's unit-wise blocks of norms: against the float64 reference, dense Fisher blocks, and by hand."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torchium
from combinations import in_turn
from kfac_problems import BARE, batch_of, random, train_reference
from torch import Tensor, nn
from torch.nn import functional as F


class Channels(nn.Module):
    """[N, 2, ...] -> [N, 3] with norms over positions."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x.sin()], dim=1)
        for norm in self.norms:
            x = torch.tanh(norm(x) * 1.5)
        return self.head(x.flatten(2).mean(2) if x.dim() > 2 else x)


class Repeated(nn.Module):
    """One norm called twice in each pass, on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.norm(x)))
        return self.last(self.norm(x).mean(1))


def evaluated(*norms: nn.Module) -> nn.Module:
    model = Channels(*norms).double()
    shape = {nn.BatchNorm1d: (3,), nn.BatchNorm2d: (3, 2), nn.BatchNorm3d: (2, 3, 2)}
    model(random(6, 2, *shape[type(norms[0])]))
    for norm in norms:
        norm.eval()
    return model


MODELS = {
    "layer": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)),
        (4,),
    ),
    "layer_of_positions": (
        lambda: nn.Sequential(nn.LayerNorm((3, 4), eps=0.1), nn.Flatten(2), nn.Flatten(),
                              nn.Linear(24, 3)),
        (2, 3, 4),
    ),
    "layer_without_bias": (
        lambda: nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 3)), (4,)),
    "rms": (lambda: nn.Sequential(nn.RMSNorm(4), nn.Flatten(), nn.Linear(12, 3)), (3, 4)),
    "group": (lambda: Channels(nn.GroupNorm(2, 4), nn.GroupNorm(1, 4, eps=0.01)), (2, 3, 2)),
    "repeated": (Repeated, (3, 4)),
    "batch_1d": (lambda: evaluated(nn.BatchNorm1d(4), nn.BatchNorm1d(4)), (2, 3)),
    "batch_2d": (lambda: evaluated(nn.BatchNorm2d(4)), (2, 3, 2)),
    "batch_3d": (lambda: evaluated(nn.BatchNorm3d(4)), (2, 2, 3, 2)),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 0.05},
    "schedules": {"lr": 0.1, "TCov": 2, "TInv": 3, "stat_decay": 0.6, "kl_clip": 0.01},
    "every_step": {"lr": 0.1, "TCov": 1, "weight_decay": 0.01, "damping": 0.1},
    "reduce": {"lr": 0.1, "TCov": 1, "TInv": 2, "weight_sharing": "reduce"},
}


def make_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    make, shape = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make().double()
        for p in model.parameters():  # away from scales of 1 and shifts of 0
            p.data += 0.2 * torch.randn_like(p)
    return model, shape


def train(model, optimizer, shape, steps, device="cpu", pieces=1) -> None:
    """`pieces`: micro-batches, whose gradients are accumulated."""
    for step in range(steps):
        x, y = (t.to(device) for t in batch_of(shape, step))
        optimizer.zero_grad()
        for part, labels in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            outputs = model(part)
            if optimizer.param_groups[0]["fisher"] != "empirical":
                optimizer.update_curvature(outputs, "cross_entropy")
            (F.cross_entropy(outputs, labels) / pieces).backward()
        optimizer.step()


def assert_same_parameters(model: nn.Module, other: nn.Module, tolerance: float = 1e-8) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p, q = p.detach().cpu(), q.detach().cpu()
        assert (p - q).norm() <= tolerance * q.norm()


@pytest.mark.parametrize(
    ("name", "options", "split"), in_turn(MODELS, OPTIONS, ["pi", "plain", "exact"])
)
def test_training_follows_the_reference(name, options, split, device):
    model, shape = make_model(name)
    reference = copy.deepcopy(model)
    train_reference(reference, shape, 5, **OPTIONS[options], damping_split=split)
    model.to(device)
    optimizer = torchium.KFAC(model, **OPTIONS[options], damping_split=split)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back
        train(model, optimizer, shape, 5, device)
    assert_same_parameters(model, reference)


@pytest.mark.parametrize("name", MODELS)
def test_ggn_follows_the_reference(name, device):
    model, shape = make_model(name)
    reference = copy.deepcopy(model)
    train_reference(reference, shape, 3, fisher="ggn", **OPTIONS["every_step"])
    model.to(device)
    optimizer = torchium.KFAC(model, fisher="ggn", **OPTIONS["every_step"])
    train(model, optimizer, shape, 3, device)
    assert_same_parameters(model, reference)


def dense_fisher(model: nn.Module, x: Tensor, y: Tensor, params: list[Tensor]) -> Tensor:
    """E[j j^T] over samples, j the gradient of these parameters."""
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(model(a), b), params)])
        for a, b in zip(x.split(1), y.split(1), strict=True)
    ]
    J = torch.stack(rows)
    return J.mT @ J / len(J)


@pytest.mark.parametrize("name", ["layer_of_positions", "rms", "group", "batch_2d", "batch_1d"])
def test_reduced_blocks_are_those_of_the_dense_fisher_matrix(name):
    """With "reduce" they have the gradients of samples, for any positions."""
    model, shape = make_model(name)
    norm = next(m for m in model.modules() if torchium_norm(m))
    params = list(norm.parameters())
    x, y = batch_of(shape, 0, size=6)
    dense = dense_fisher(model, x, y, params)
    optimizer = torchium.KFAC(model, weight_sharing="reduce", **BARE)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    blocks = optimizer.state[norm.weight]["fisher_blocks"]
    C = norm.weight.numel()
    for c in range(C):
        of_channel = [c + i * C for i in range(len(params))]
        expected = dense[of_channel][:, of_channel]
        torch.testing.assert_close(blocks[c], expected, rtol=1e-10, atol=1e-14)


def torchium_norm(module: nn.Module) -> bool:
    return isinstance(
        module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)
    )


@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_batch_statistics_count_as_constants(dims, weight_sharing):
    """In training mode: the output gradients of the whole batch, and x^ with its statistics."""
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims](4)
    model = Channels(norm).double()
    N, damping = 5, 0.03
    x, y = random(N, 2, *(3, 2, 2)[:dims]), torch.arange(N) % 3
    outputs = []
    handle = norm.register_forward_hook(lambda m, args, out: outputs.extend((args[0], out)))
    loss = F.cross_entropy(model(x), y)
    handle.remove()
    a, g = outputs[0].detach(), N * torch.autograd.grad(loss, outputs[1])[0]
    a, g = (t.reshape(N, 4, -1).mT for t in (a, g))  # [N, T, C]
    rows = a.reshape(-1, 4)
    a = (a - rows.mean(0)) / torch.sqrt(rows.var(0, correction=0) + norm.eps)
    j = torch.stack([a * g, g], dim=-1)  # [N, T, C, 2]
    j = j.sum(1) if weight_sharing == "reduce" else j.flatten(0, 1)
    expected = torch.einsum("nci,ncj->cij", j, j) / N

    optimizer = torchium.KFAC(model, weight_sharing=weight_sharing, damping=damping, **BARE)
    before = torch.stack([norm.weight, norm.bias], dim=-1).detach()
    F.cross_entropy(model(x), y).backward()
    V = torch.stack([norm.weight.grad, norm.bias.grad], dim=-1)
    optimizer.step()
    blocks = optimizer.state[norm.weight]["fisher_blocks"]
    torch.testing.assert_close(blocks, expected, rtol=1e-10, atol=1e-14)
    step = before - torch.stack([norm.weight, norm.bias], dim=-1).detach()
    solved = torch.linalg.solve(expected + damping * torch.eye(2, dtype=V.dtype), V)
    torch.testing.assert_close(step, solved, rtol=1e-9, atol=1e-12)
    assert optimizer.report()["parameters"]["norms.0.bias"] == (
        "unit-wise",
        "4 blocks 2 x 2 of norms.0.weight",
    )


def test_statistics_are_those_of_the_call_although_others_follow_before_backward():
    model, shape = make_model("batch_1d")
    blocks = []
    for value in (None, 100.0):
        each = copy.deepcopy(model)
        optimizer = torchium.KFAC(each, TCov=1)
        loss = F.cross_entropy(*(each(batch_of(shape, 0)[0]), batch_of(shape, 0)[1]))
        if value is not None:  # of the last norm, behind which no gradient depends on it
            each.norms[1].running_mean.data.fill_(value)
        loss.backward()
        optimizer.step()
        blocks.append(optimizer.state[each.norms[1].weight]["fisher_blocks"])
    assert torch.equal(*blocks)


def test_a_batch_norm_may_change_its_mode():
    model, x = Channels(nn.BatchNorm1d(4)).double(), random(6, 2)
    optimizer, blocks = torchium.KFAC(model, TCov=1, stat_decay=0.0), []
    for mode in (True, False, True):
        model.train(mode)
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        with torch.no_grad():
            saved = [p.clone() for p in model.parameters()]
            optimizer.step()
            for p, value in zip(model.parameters(), saved, strict=True):
                p.copy_(value)
        blocks.append(optimizer.state[model.norms[0].weight]["fisher_blocks"].clone())
    torch.testing.assert_close(blocks[2], blocks[0])
    assert (blocks[1] - blocks[0]).norm() > 0.1 * blocks[0].norm()


@pytest.mark.parametrize("name", ["layer", "rms", "group", "batch_2d"])
def test_accumulated_micro_batches_are_one_batch(name):
    model, shape = make_model(name)
    twin = copy.deepcopy(model)
    train(model, torchium.KFAC(model, TCov=1, lr=0.1), shape, 3)
    train(twin, torchium.KFAC(twin, TCov=1, lr=0.1), shape, 3, pieces=2)
    assert_same_parameters(twin, model, 1e-10)


def test_mc_is_ggn_in_expectation():
    model, shape = make_model("layer")
    norm, blocks = model[1], {}
    for fisher, options in {"ggn": {}, "mc": {"samples": 4000}}.items():
        torch.manual_seed(0)
        each = copy.deepcopy(model)
        optimizer = torchium.KFAC(each, fisher=fisher, TCov=1)
        outputs = each(batch_of(shape, 0)[0])
        optimizer.update_curvature(outputs, "cross_entropy", **options)
        outputs.sum().backward()
        optimizer.step()
        blocks[fisher] = optimizer.state[each[1].weight]["fisher_blocks"]
    assert (blocks["mc"] - blocks["ggn"]).norm() <= 0.1 * blocks["ggn"].norm()
    assert norm.weight.shape[0] == len(blocks["mc"])


def test_ekfac_uses_the_same_blocks():
    model, shape = make_model("layer")
    twin = copy.deepcopy(model)
    options = {"TCov": 1, "lr": 0.1, "damping_split": "exact"}
    kfac, ekfac = torchium.KFAC(model, **options), torchium.KFAC(twin, ekfac=True, **options)
    train(model, kfac, shape, 1)
    train(twin, ekfac, shape, 1)
    assert_same_parameters(twin, model, 1e-12)  # no second moments yet
    assert set(ekfac.state[twin[1].weight]) == set(kfac.state[model[1].weight])


def test_a_checkpoint_continues_bit_by_bit():
    model, shape = make_model("group")
    optimizer = torchium.KFAC(model, TCov=2, lr=0.1)
    train(model, optimizer, shape, 3)
    other = copy.deepcopy(model)
    loaded = torchium.KFAC(other, TCov=2, lr=0.1)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, shape, 3)
    train(other, loaded, shape, 3)
    assert_same_parameters(other, model, 0.0)
    state = copy.deepcopy(optimizer.state_dict())
    key = next(k for k, s in state["state"].items() if "fisher_blocks" in s)
    state["state"][key]["fisher_blocks"] = torch.zeros(3, 2, 2)
    with pytest.raises(ValueError, match="fisher_blocks"):
        loaded.load_state_dict(state)
    del state["state"][key]["fisher_blocks"]
    with pytest.raises(ValueError, match="factor_updates"):
        loaded.load_state_dict(state)
    del loaded.state[other.norms[0].weight]["factor_updates"]
    with pytest.raises(ValueError, match="lost 'factor_updates'"):
        train(other, loaded, shape, 1)


@pytest.mark.parametrize("damping", [0.0, 1e-12, 1e-3])
@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e8])
def test_singular_and_huge_blocks(scale, damping, device):
    """One sample: rank one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1, bias=False)).to(device)
    optimizer = torchium.KFAC(model, damping=damping, eps=0.0, **BARE)
    (scale * model(torch.randn(1, 4).to(device))).sum().backward()
    V = torch.stack([p.grad.double() for p in model[0].parameters()], dim=-1)
    before = torch.stack([p.detach().double() for p in model[0].parameters()], dim=-1)
    optimizer.step()
    step = before - torch.stack([p.detach().double() for p in model[0].parameters()], dim=-1)
    assert step.isfinite().all()
    if damping == 1e-3 and scale < 10:
        blocks = optimizer.state[model[0].weight]["fisher_blocks"].double()
        expected = torch.linalg.solve(blocks + damping * torch.eye(2).to(blocks), V)
        torch.testing.assert_close(step, expected, rtol=1e-3, atol=1e-6)


def test_a_weight_of_a_norm_and_of_another_layer_falls_back_by_name():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm((2, 4)), nn.Linear(4, 2)
            self.linear.weight = self.norm.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x))

    model = Both()
    optimizer = torchium.KFAC(model)
    model(torch.randn(5, 2, 4)).square().mean().backward()
    with pytest.warns(UserWarning, match="preconditions 0 of 3"):
        optimizer.step()
    report = optimizer.report()["parameters"]
    assert report["norm.weight"] == ("fallback", "used by a norm and by another layer")


def test_a_frozen_shift_leaves_blocks_of_the_scale():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    optimizer = torchium.KFAC(model)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["fisher_blocks"].shape == (4, 1, 1)
    assert optimizer.report()["parameters"]["0.weight"] == ("unit-wise", "4 blocks 1 x 1")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_loss_scale_does_not_change_the_blocks(is_known):
    model, shape = make_model("layer")
    model.float()
    twin = copy.deepcopy(model)
    x, y = batch_of(shape, 0)
    plain, scaled = torchium.KFAC(model, lr=0.1), torchium.KFAC(twin, lr=0.1)
    F.cross_entropy(model(x.float()), y).backward()
    plain.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    if is_known:
        scaled.grad_scaler = scaler
    scaler.scale(F.cross_entropy(twin(x.float()), y)).backward()
    scaler.step(scaled)
    assert_same_parameters(twin, model, 1e-6)


def test_a_preconditioner_writes_the_directions_of_norms():
    model, shape = make_model("group")
    twin = copy.deepcopy(model)
    options = {"damping": 0.1, "kl_clip": None}
    kfac = torchium.KFAC(model, lr=0.1, momentum=0.0, TCov=1, TInv=1, **options)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
    preconditioner = torchium.KFACPreconditioner(
        twin, factor_update_steps=1, inv_update_steps=1, **options
    )
    for step in range(3):
        x, y = batch_of(shape, step)
        for each, optimizer in ((model, kfac), (twin, sgd)):
            optimizer.zero_grad()
            F.cross_entropy(each(x), y).backward()
        kfac.step()
        preconditioner.step()
        sgd.step()
    assert_same_parameters(twin, model, 1e-10)
