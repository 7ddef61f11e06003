"""Shampoo.from_adamw: the options that it keeps, and steps as long as AdamW's."""

from __future__ import annotations

import pytest
import torch
import torchium
from optimizer_cases import mlp, set_gradients, values
from torch import nn
from torch.optim import lr_scheduler


def twins(*shapes: tuple[int, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(p.clone()) for p in start], [nn.Parameter(p.clone()) for p in start]


OPTIONS = {
    "defaults": {},
    "all": {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.3, "maximize": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_vectors_and_scalars_step_as_with_adamw(options):
    """Except for eps, which the diagonal rule adds under the root: here g^2 is far above eps^2."""
    ours, theirs = twins((7,), (), (1, 9))
    shampoo = torchium.Shampoo.from_adamw(ours, **options)
    adamw = torch.optim.AdamW(theirs, **options)
    for step in range(30):
        for params in (ours, theirs):
            set_gradients(params, step)
        shampoo.step()
        adamw.step()
    # |g| may be near eps = 1e-4 by chance; the updates themselves are about 30 lr.
    tolerance = 30 * shampoo.defaults["lr"] * (1e-2 if options else 1e-5)
    torch.testing.assert_close(values_of(ours), values_of(theirs), rtol=0, atol=tolerance)


def values_of(params):
    return [p.detach() for p in params]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_first_updates_of_matrices_have_the_length_of_adams(kind):
    """Blocks of 4: the first step of each is as long as Adam's, excluding weight decay."""
    ours, theirs = twins((8, 4), (4, 4, 1, 1))
    adam = kind(theirs, lr=0.01, weight_decay=0.1)
    shampoo = torchium.Shampoo.from_adamw(kind(ours, lr=0.01, weight_decay=0.1), block_size=4)
    before = [p.detach().clone() for p in ours]
    for params in (ours, theirs):
        set_gradients(params, 0)
    shampoo.step()
    adam.step()
    decoupled = kind is torch.optim.AdamW
    for start, p, q in zip(before, ours, theirs, strict=True):
        kept = start * (1 - 0.01 * 0.1) if decoupled else start
        for i in range(0, p.shape[0], 4):
            length = (p.detach() - kept)[i : i + 4].norm()
            torch.testing.assert_close(length, (q.detach() - kept)[i : i + 4].norm())
            assert not torch.allclose(p[i : i + 4], q[i : i + 4], rtol=0, atol=1e-4)


def test_before_the_start_of_preconditioning_it_is_adamw():
    ours, theirs = twins((6, 5), (5,), (3, 2, 3, 3))
    shampoo = torchium.Shampoo.from_adamw(ours, start_preconditioning_step=100)
    adamw = torch.optim.AdamW(theirs)
    for step in range(20):
        for params in (ours, theirs):
            set_gradients(params, step)
        shampoo.step()
        adamw.step()
    torch.testing.assert_close(values_of(ours), values_of(theirs), rtol=0, atol=1e-7)


def test_takes_over_the_groups_of_an_optimizer():
    model = mlp()
    named = list(model.named_parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": named[:2], "weight_decay": 0.0, "eps": 1e-6, "fused": True},
            {"params": named[2:], "lr": 5e-4, "betas": (0.8, 0.9), "own_key": "kept"},
        ],
        lr=2e-3,
        weight_decay=0.05,
        maximize=True,
    )
    lr_scheduler.StepLR(adamw, 1, 0.5)
    adamw.step()
    shampoo = torchium.Shampoo.from_adamw(adamw, update_freq=7, block_size=64)
    first, second = shampoo.param_groups
    assert first["param_names"] == [name for name, _ in named[:2]]
    assert all(p is q for p, (_, q) in zip(second["params"], named[2:], strict=True))
    assert (first["lr"], first["weight_decay"]) == (2e-3, 0.0)
    assert (first["eps"], first["grafting_eps"]) == (1e-6 * 1e-6, 1e-6)
    assert (second["lr"], second["initial_lr"], second["weight_decay"]) == (5e-4, 5e-4, 0.05)
    assert second["betas"] == (0.8, 0.9)
    assert second["own_key"] == "kept"
    for group in shampoo.param_groups:
        assert group["maximize"]
        assert group["decoupled_weight_decay"]
        assert (group["update_freq"], group["block_size"]) == (7, 64)
        assert group["grafting"] == "adam"
        assert not {"amsgrad", "foreach", "fused", "differentiable"} & group.keys()
    assert len(adamw.param_groups[0]["params"]) == 2
    assert adamw.param_groups[0]["eps"] == 1e-6
    assert shampoo.defaults["lr"] == 2e-3
    shampoo.add_param_group({"params": [("late", nn.Parameter(torch.zeros(2)))]})
    assert shampoo.param_groups[2]["weight_decay"] == 0.05


def test_adam_has_an_l2_penalty():
    params = [nn.Parameter(torch.ones(2))]
    adam = torch.optim.Adam(params, weight_decay=0.1)
    assert not torchium.Shampoo.from_adamw(adam).param_groups[0]["decoupled_weight_decay"]


def test_groups_of_parameters_hold_options_of_adamw():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    shampoo = torchium.Shampoo.from_adamw(
        [{"params": [first], "eps": 1e-3, "foreach": True}, {"params": [second], "update_freq": 3}],
        lr=0.1,
        betas=(torch.tensor(0.5), 0.75),
    )
    one, two = shampoo.param_groups
    assert (one["eps"], one["grafting_eps"]) == (1e-3 * 1e-3, 1e-3)
    assert (two["eps"], two["grafting_eps"]) == (1e-8 * 1e-8, 1e-8)
    assert (two["update_freq"], two["weight_decay"]) == (3, 0.01)
    assert one["betas"] == (0.5, 0.75)
    assert one["lr"] == 0.1


def test_the_learning_rate_may_be_a_tensor():
    rate = torch.tensor(1e-2)
    p = nn.Parameter(torch.zeros(3))
    shampoo = torchium.Shampoo.from_adamw(torch.optim.AdamW([p], lr=rate, foreach=False))
    set_gradients([p], 0)
    shampoo.step()
    torch.testing.assert_close(p.detach().abs(), torch.full((3,), 1e-2), rtol=1e-4, atol=0)
    assert isinstance(shampoo.param_groups[0]["lr"], torch.Tensor)


def test_schedulers_of_the_optimizer_write_into_no_rate_of_the_new_one():
    rate = torch.tensor(1e-2)
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(3))], lr=rate, foreach=False)
    first, second = (torchium.Shampoo.from_adamw(adamw) for _ in range(2))
    for optimizer in (adamw, second):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
        optimizer.step()
        scheduler.step()
    rates = [float(each.param_groups[0]["lr"]) for each in (adamw, first, second)]
    assert rates == pytest.approx([1e-3, 1e-2, 1e-3])
    assert first.defaults["lr"] == rate.new_tensor(1e-2)


def test_capturable_is_not_taken_over():
    params = [nn.Parameter(torch.ones(2, 2))]
    adamw = torch.optim.AdamW(params, capturable=True)
    assert not torchium.Shampoo.from_adamw(adamw).param_groups[0]["capturable"]
    assert torchium.Shampoo.from_adamw(adamw, capturable=True).param_groups[0]["capturable"]
    assert torchium.Shampoo.from_adamw(params, capturable=True).param_groups[0]["capturable"]


def test_zero_gradients_are_harmless():
    params, _ = twins((6, 4), (5,))
    shampoo = torchium.Shampoo.from_adamw(params, weight_decay=0.0)
    before = values_of([nn.Parameter(p.detach().clone()) for p in params])
    for _ in range(3):
        for p in params:
            p.grad = torch.zeros_like(p)
        shampoo.step()
    torch.testing.assert_close(values_of(params), before, rtol=0, atol=0)
    set_gradients(params, 0)
    params[0].grad[:, 2:] = 0  # statistics of low rank
    shampoo.step()
    assert all(p.isfinite().all() for p in params)


def test_trains():
    model = mlp()
    shampoo = torchium.Shampoo.from_adamw(model.parameters(), lr=1e-2)
    x, y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(64, 3)
    losses = []
    for _ in range(60):
        shampoo.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        shampoo.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    assert all(p.isfinite().all() for p in values(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True"),
        ({"differentiable": True}, "differentiable=True"),
        ({"eps": -1e-8}, r"eps must be a finite number in \[0, inf\), got -1e-08"),
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.5)}, r"betas\[1\]"),
        ({"relative_eps": -1.0}, "relative_eps"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        torchium.Shampoo.from_adamw([nn.Parameter(torch.ones(2))], **options)


def test_refused_optimizers():
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="SGD"):
        torchium.Shampoo.from_adamw(torch.optim.SGD(params, lr=0.1))
    with pytest.raises(ValueError, match="amsgrad=True"):
        torchium.Shampoo.from_adamw(torch.optim.AdamW(params, amsgrad=True))
    with pytest.raises(ValueError, match=r"lr=0\.1 cannot be given beside an optimizer"):
        torchium.Shampoo.from_adamw(torch.optim.AdamW(params), lr=0.1)
    with pytest.raises(TypeError, match="no_option"):
        torchium.Shampoo.from_adamw(params, no_option=1)
