"""K-FAC as a preconditioner of other optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
import torchium
from captured_layers import Conv1D
from combinations import in_turn
from cuda_waits import no_waits
from optimizer_cases import assert_same, backward, mlp, through_a_file, values
from torch import Tensor, nn
from torch.amp import GradScaler
from torchium import KFAC, KFACPreconditioner

pytestmark = pytest.mark.filterwarnings("ignore:KFAC")

# Options of the preconditioner, and the same ones of KFAC.
OPTIONS = [
    ({}, {}),
    (dict(factor_update_steps=2, inv_update_steps=3), dict(TCov=2, TInv=3)),
    (dict(damping_split="exact", factor_decay=0.5), dict(damping_split="exact", stat_decay=0.5)),
    (
        dict(kl_clip=None, damping=0.3, max_factor_size=5, solver="newton"),
        dict(kl_clip=None, damping=0.3, max_factor_size=5, solver="newton"),
    ),
    (
        dict(batch_averaged=False, eps=1e-3, weight_sharing="reduce", damping_split="plain"),
        dict(batch_averaged=False, eps=1e-3, weight_sharing="reduce", damping_split="plain"),
    ),
]


class Convolutions(nn.Module):
    """Groups, a norm, an [in, out] weight and a layer that gets a gradient late."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4)
        self.mix, self.head = Conv1D(5, 64), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x)))
        return self.head(torch.tanh(self.mix(x.flatten(1))))


def convolutions(device: torch.device, layout: torch.memory_format) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Convolutions()
    return model.to(device, memory_format=layout)


def loss_of(model: nn.Module, step: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    parameter = next(model.parameters())
    shape = (8, 2, 4, 4) if isinstance(model, Convolutions) else (8, 6)
    x = torch.randn(shape, generator=generator).to(parameter.device, parameter.dtype)
    target = torch.randint(3, (8,), generator=generator).to(parameter.device)
    return scale * nn.functional.cross_entropy(model(x), target)


def trained(model: nn.Module, optimizer, preconditioner=None, steps: int = 8) -> list[Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if preconditioner is not None:
            preconditioner.step()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("make", "options", "dtype"),
    in_turn(["mlp", "contiguous", "channels_last"], OPTIONS, [torch.float32, torch.float64]),
)
def test_with_sgd_it_is_kfac(make, options, dtype, momentum, device):
    own, kfac = options

    def model() -> nn.Module:
        if make == "mlp":
            return mlp(device, dtype)
        layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
        return convolutions(device, layouts[make]).to(dtype)

    expected_model, actual_model = model(), model()
    optimizer = KFAC(expected_model, lr=0.05, momentum=momentum, **kfac)
    expected = trained(expected_model, optimizer)
    preconditioner = KFACPreconditioner(actual_model, lr=0.05, **own)
    sgd = torch.optim.SGD(actual_model.parameters(), lr=0.05, momentum=momentum)
    actual = trained(actual_model, sgd, preconditioner)
    rounding = 1e-13 if dtype == torch.float64 else 5e-6
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)
    assert not any(torch.equal(a, b) for a, b in zip(actual, values(model()), strict=True))


def test_the_first_direction_is_that_of_kfac_bit_for_bit(device):
    model, other = mlp(device), mlp(device)
    optimizer = KFAC(model, lr=1.0, momentum=0.5)
    preconditioner = KFACPreconditioner(other, lr=1.0)
    for each in (model, other):
        loss_of(each, 0).backward()
    optimizer.step()
    preconditioner.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(q.grad, optimizer.state[p]["momentum_buffer"])  # 0.5 * 0 + direction


def test_factors_may_come_from_the_curvature_of_the_loss(device):
    model, other = mlp(device), mlp(device)
    optimizer = KFAC(model, lr=0.05, momentum=0.9, fisher="ggn", TCov=2)
    preconditioner = KFACPreconditioner(other, lr=0.05, fisher="ggn", factor_update_steps=2)
    sgd = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(8, 6, generator=generator).to(device)
        targets = torch.randint(3, (8,), generator=generator).to(device)
        for each, outer in ((model, optimizer), (other, preconditioner)):
            outer.zero_grad()
            outputs = each(x)
            outer.update_curvature(outputs, "cross_entropy")
            nn.functional.cross_entropy(outputs, targets).backward()
            outer.step()
        sgd.step()
    torch.testing.assert_close(values(other), values(model), rtol=5e-6, atol=5e-6)


def test_only_gradients_of_layers_change(device):
    model = nn.Sequential(*mlp(device), nn.PReLU(device=device))
    preconditioner = KFACPreconditioner(model)
    before = values(model)
    loss_of(model, 0).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.warns(
        UserWarning, match=r"KFACPreconditioner preconditions 6 of 7 .*as they are for"
    ) as warned:
        preconditioner.step()
    assert {w.filename for w in warned} == {__file__}  # the user's line
    assert_same(values(model), before)
    unchanged = [torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True)]
    assert unchanged == [False] * 6 + [True]
    assert preconditioner.report()["fallback"] == ["4.weight"]
    assert preconditioner.report()["parameters"]["0.weight"] == ("factors", "A 7, G 5")


@pytest.mark.parametrize("outer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_any_optimizer_takes_the_step(outer, device):
    model = mlp(device)
    preconditioner = KFACPreconditioner(model, lr=0.01)
    start = loss_of(model, 3).item()
    optimizer = outer(model.parameters(), lr=0.03)
    for _ in range(40):
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        preconditioner.step()
        optimizer.step()
    assert loss_of(model, 3).item() < 0.7 * start


def test_the_clip_is_of_the_learning_rates_of_the_groups(device):
    """A clipped direction is as long as lr in the metric of the Fisher matrix allows."""

    def clipped(lrs: tuple[float, float]) -> list[Tensor]:
        model = mlp(device)
        groups = [
            {"params": list(model[k].parameters()), "lr": lr}
            for k, lr in zip((0, 3), lrs, strict=True)
        ]
        preconditioner = KFACPreconditioner(groups, kl_clip=1e-9)
        for step in range(2):  # layers of groups are found when they run
            model.zero_grad()
            loss_of(model, step).backward()
            preconditioner.step()
        return [p.grad for p in model.parameters()]

    single, double, mixed = clipped((0.1, 0.1)), clipped((0.2, 0.2)), clipped((0.1, 0.2))
    torch.testing.assert_close(single[0], 2 * double[0])
    assert 1.05 < float(single[0].norm() / mixed[0].norm()) < 1.95


def test_micro_batches_are_one_batch(device):
    model, other = mlp(device), mlp(device)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(device)
    for each, parts in ((model, [x]), (other, [x[:4], x[4:]])):
        preconditioner = KFACPreconditioner(each)
        for part in parts:
            (each(part).square().sum(1).mean() / len(parts)).backward()
        preconditioner.step()
    grads = [[p.grad for p in each.parameters()] for each in (model, other)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


# ---- mixed precision


def test_a_scaler_does_not_change_the_steps(device):
    plain, scaled = mlp(device), mlp(device)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    expected = trained(plain, sgd, KFACPreconditioner(plain, lr=0.05))
    scaler = GradScaler(device.type, init_scale=1024.0)
    preconditioner = KFACPreconditioner(scaled, lr=0.05, grad_scaler=scaler)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.05, momentum=0.9)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(scaled, step)).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(values(scaled), expected, rtol=1e-6, atol=1e-7)


def test_steps_that_the_scaler_skips_are_no_failures(device):
    model = mlp(device)
    scaler = GradScaler(device.type, init_scale=2.0**127, growth_interval=1000)
    preconditioner = KFACPreconditioner(model, lr=0.05, grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    skipped = 0
    for step in range(40):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, 1e4)).backward()
        before, scale = values(model), scaler.get_scale()
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            assert_same(values(model), before)
    preconditioner.check_errors()
    assert 3 < skipped < 40
    taken = preconditioner.state[model[0].weight]["step"]
    assert float(taken) == 40 - skipped


def test_a_scaler_must_not_call_its_step(device):
    model = mlp(device)
    scaler = GradScaler(device.type)
    preconditioner = KFACPreconditioner(model, grad_scaler=scaler)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(ValueError, match=r"call step\(\) itself, after scaler\.unscale_"):
        scaler.step(preconditioner)


@pytest.mark.parametrize("unscales", ["nothing", "the preconditioner"])
def test_gradients_that_still_have_the_scale_are_refused(device, unscales):
    model = mlp(device)
    scaler = GradScaler(device.type, init_scale=1024.0)
    preconditioner = KFACPreconditioner(model, grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):  # in the second one, the first has unscaled and stepped
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 0:
            scaler.unscale_(optimizer)
            preconditioner.step()
            scaler.step(optimizer)
            scaler.update()
    if unscales == "the preconditioner":
        scaler.unscale_(preconditioner)
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"call scaler\.unscale_\(optimizer\)"):
        preconditioner.step()
    assert_same([p.grad for p in model.parameters()], grads)


def test_a_disabled_scaler_needs_no_unscaling(device):
    model = mlp(device)
    preconditioner = KFACPreconditioner(model, grad_scaler=GradScaler(device.type, enabled=False))
    loss_of(model, 0).backward()
    before = model[0].weight.grad.clone()
    preconditioner.step()
    assert not torch.equal(model[0].weight.grad, before)


# ---- failures


def test_a_missing_curvature_is_an_error_of_the_preconditioner():
    model = mlp()
    preconditioner = KFACPreconditioner(model, fisher="ggn")
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"^KFACPreconditioner with fisher='ggn' .*not called"):
        preconditioner.step()


def test_gradients_that_are_not_finite_stay_and_the_third_time_raises():
    model = mlp()
    preconditioner = KFACPreconditioner(model)
    for attempt in range(3):
        model.zero_grad()
        loss_of(model, attempt).backward()
        model[0].weight.grad[0, 0] = torch.nan
        grads = [p.grad.clone() for p in model.parameters()]
        if attempt < 2:
            preconditioner.step()
        else:
            with pytest.raises(
                RuntimeError, match=r"KFACPreconditioner: 3 steps in a row .*of its layer"
            ):
                preconditioner.step()
        assert_same([p.grad for p in model.parameters()], grads)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("factor_update_steps", 0),
        ("inv_update_steps", 1.5),
        ("factor_decay", 1.1),
        ("damping", -1.0),
        ("kl_clip", 0.0),
        ("lr", -0.1),
    ],
)
def test_wrong_options_raise_with_their_names(option, value):
    with pytest.raises(ValueError, match=f"{option} must be .*{value}"):
        KFACPreconditioner(mlp(), **{option: value})
    model = mlp()
    preconditioner = KFACPreconditioner(model)
    preconditioner.param_groups[0][option] = value
    backward(model, 0)
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"{option} must be .*{value}"):
        preconditioner.step()
    assert_same([p.grad for p in model.parameters()], grads)


def test_options_of_the_optimizer_behind_are_unknown():
    for option in ("momentum", "weight_decay", "TCov", "maximize"):
        with pytest.raises(TypeError, match=option):
            KFACPreconditioner(mlp(), **{option: 1})


# ---- checkpoints and copies


def preconditioned_run(model, optimizer, preconditioner, first: int, last: int) -> list[Tensor]:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        preconditioner.step()
        optimizer.step()
    return values(model)


def make_pair(model: nn.Module) -> tuple[torch.optim.SGD, KFACPreconditioner]:
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return sgd, KFACPreconditioner(model, lr=0.05, factor_update_steps=2, inv_update_steps=3)


@pytest.mark.parametrize("pause", [1, 2, 3, 4])
def test_a_checkpoint_goes_on_bit_for_bit(pause, device):
    model = mlp(device)
    sgd, preconditioner = make_pair(model)
    preconditioned_run(model, sgd, preconditioner, 0, pause)
    saved = through_a_file([each.state_dict() for each in (model, sgd, preconditioner)])
    expected = preconditioned_run(model, sgd, preconditioner, pause, 8)
    resumed = mlp(device)
    objects = [resumed, *make_pair(resumed)]
    for each, state in zip(objects, saved, strict=True):
        each.load_state_dict(state)
    assert_same(preconditioned_run(*objects, pause, 8), expected)


def test_a_copy_goes_on_bit_for_bit(device):
    model = mlp(device)
    objects = (model, *make_pair(model))
    preconditioned_run(*objects, 0, 3)
    copies = copy.deepcopy(objects)
    assert_same(preconditioned_run(*copies, 3, 6), preconditioned_run(*objects, 3, 6))


def test_checkpoints_of_kfac_and_of_its_preconditioner_are_told_apart():
    model = mlp()
    preconditioner, optimizer = KFACPreconditioner(model), KFAC(model)
    with pytest.raises(ValueError, match="not one of KFACPreconditioner"):
        preconditioner.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="not one of KFAC"):
        optimizer.load_state_dict(preconditioner.state_dict())


@pytest.mark.cuda
def test_a_step_does_not_wait():
    model = mlp("cuda")
    scaler = GradScaler("cuda", init_scale=4.0)
    preconditioner = KFACPreconditioner(model, lr=lambda step: 0.1 / step, grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        if step < 2:
            preconditioner.step()
            scaler.step(optimizer)
            scaler.update()
            continue
        with no_waits() as asleep:
            preconditioner.step()
        assert not asleep.query()


@pytest.mark.cuda
def test_gradients_of_other_layouts_and_dtypes():
    """As on the CPU; the kernels know neither float64 nor a gradient with other strides."""
    grads = []
    for device in ("cpu", "cuda"):
        model = convolutions(torch.device(device), torch.contiguous_format)
        model.head.double()
        preconditioner = KFACPreconditioner(model)
        x = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(0)).to(device)
        hidden = torch.tanh(model.norm(model.conv(x)))
        model.head(torch.tanh(model.mix(hidden.flatten(1))).double()).square().sum(
            1
        ).mean().backward()
        weight = model.mix.weight
        weight.grad = weight.grad.t().contiguous().t()
        preconditioner.step()
        assert weight.grad.stride() == (1, 64)
        grads.append([p.grad.cpu() for p in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-3, atol=1e-4)


def test_it_is_no_optimizer_by_name():
    assert "kfacpreconditioner" not in torchium.get_available_optimizers()
