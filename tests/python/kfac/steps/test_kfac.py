"""torchium.KFAC through its public interface, against dense solves, the float64 reference and curvlinops.

Options that make one step the direction itself: lr 1, no momentum, no KL clip.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torchium
from combinations import in_turn
from kfac_problems import (
    BARE,
    MODELS,
    OPTIONS,
    SPLITS,
    assert_close_in_norm,
    assert_each_close_in_norm,
    batch_of,
    curvlinops_directions,
    factors_of,
    make_model,
    mlp,
    random,
    random_network,
    train_reference,
    updates,
)
from optimizer_cases import ignore_fallback
from torch import nn
from torch.nn import functional as F

# Hand-built solves


@pytest.mark.parametrize("damping", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("bias", [True, False])
def test_one_sample_is_the_dense_damped_empirical_fisher(damping, bias, device):
    """Exact damping, no weight sharing: each block of the Fisher matrix is j j^T, j its gradient."""
    model = mlp(5, 4, 3, bias=bias).to(device)
    optimizer = torchium.KFAC(model, damping=damping, eps=1e-14, damping_split="exact", **BARE)
    loss = F.cross_entropy(model(random(1, 5).to(device)), torch.tensor([2], device=device))
    loss.backward()
    js = [p.grad.clone() for p in model.parameters()]
    for i, p in enumerate(model.parameters()):  # any V: .grad is preconditioned
        p.grad += random(*p.shape, seed=i).to(device)
    V = [p.grad.clone() for p in model.parameters()]
    step = updates(model, optimizer)
    per_layer = 2 if bias else 1
    for first in range(0, len(js), per_layer):
        of_layer = slice(first, first + per_layer)
        j, v, d = (torch.cat([t.flatten() for t in x[of_layer]]) for x in (js, V, step))
        fisher = torch.outer(j, j) + damping * torch.eye(len(j), dtype=j.dtype, device=device)
        assert_close_in_norm(d, torch.linalg.solve(fisher, v), 1e-8)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["sequence", "convolution"])
def test_reduce_is_exact_for_a_mean_over_the_positions(kind, bias, device):
    """One sample, exact damping: the block of the Fisher matrix is j j^T, j its gradient."""
    damping = 1e-2
    if kind == "sequence":
        model: nn.Module = nn.Linear(4, 3, bias=bias)
        x, positions = random(1, 5, 2, 4), (1, 2)
    else:
        model = nn.Conv2d(2, 3, 2, padding=1, stride=2, bias=bias)
        x, positions = random(1, 2, 5, 4), (2, 3)
    model.double().to(device)
    options = {"damping": damping, "eps": 1e-14, "damping_split": "exact", **BARE}
    optimizer = torchium.KFAC(model, weight_sharing="reduce", **options)
    label = torch.tensor([2], device=device)
    F.cross_entropy(model(x.to(device)).mean(positions), label).backward()
    j = torch.cat([p.grad.flatten() for p in model.parameters()])
    for i, p in enumerate(model.parameters()):
        p.grad += random(*p.shape, seed=i).to(device)
    v = torch.cat([p.grad.flatten() for p in model.parameters()])
    d = torch.cat([step.flatten() for step in updates(model, optimizer)])
    fisher = torch.outer(j, j) + damping * torch.eye(len(j), dtype=j.dtype, device=device)
    assert_close_in_norm(d, torch.linalg.solve(fisher, v), 1e-8)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("batch_averaged", [True, False])
def test_a_step_equals_solves_by_hand(split, batch_averaged, device):
    """Two layers, with inputs and output gradients by the chain rule."""
    damping, N = 0.02, 6
    model = mlp(4, 5, 3).to(device)
    x, target = random(N, 4).to(device), random(N, 3, seed=1).to(device)
    optimizer = torchium.KFAC(
        model,
        damping=damping,
        eps=0.0,
        damping_split=split,
        batch_averaged=batch_averaged,
        **BARE,
    )
    losses = (model(x) - target).square().sum(1) / 2
    (losses.mean() if batch_averaged else losses.sum()).backward()

    first, _, second = model
    hidden = torch.tanh(x @ first.weight.mT + first.bias)
    residual = hidden @ second.weight.mT + second.bias - target
    behind = residual @ second.weight * (1 - hidden**2)
    expected = []
    for layer, a, g in [(first, x, behind), (second, hidden, residual)]:
        a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        A, G = a.mT @ a / N, g.mT @ g / N
        V = torch.cat([layer.weight.grad, layer.bias.grad.unsqueeze(1)], 1)
        eye_A, eye_G = (torch.eye(len(M), dtype=M.dtype, device=device) for M in (A, G))
        if split == "exact":
            F_damped = torch.kron(G, A) + damping * torch.kron(eye_G, eye_A)
            D = torch.linalg.solve(F_damped, V.flatten()).view_as(V)
        else:
            ratio = (A.trace() / len(A)) / (G.trace() / len(G))
            pi = ratio.sqrt() if split == "pi" else 1.0
            D = torch.linalg.solve(G + damping**0.5 / pi * eye_G, V)
            D = D @ torch.linalg.inv(A + pi * damping**0.5 * eye_A)
        expected += [D[:, :-1], D[:, -1]]
    assert_each_close_in_norm(updates(model, optimizer), expected, 1e-9)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_over_its_whole_input_is_a_linear_layer(split, bias, device):
    convolution = nn.Sequential(nn.Conv2d(2, 5, (3, 4), bias=bias), nn.Flatten()).double()
    linear = nn.Sequential(nn.Flatten(), nn.Linear(24, 5, bias=bias)).double()
    linear.load_state_dict(
        {"1." + k[2:]: v.view(linear[1].get_parameter(k[2:]).shape)
         for k, v in convolution.state_dict().items()}
    )  # fmt: skip
    results = []
    for model in (convolution.to(device), linear.to(device)):
        optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=2, damping_split=split)
        for step in range(4):
            x = random(6, 2, 3, 4, seed=step).to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.arange(6, device=device) % 5).backward()
            optimizer.step()
        results.append([p.detach().flatten() for p in model.parameters()])
    assert_each_close_in_norm(*results, 1e-10)


# Against the reference


@ignore_fallback
@pytest.mark.parametrize(("name", "options", "split"), in_turn(MODELS, OPTIONS, SPLITS))
def test_training_follows_the_reference(name, options, split, device):
    model, shape = make_model(name)
    reference = copy.deepcopy(model)
    train_reference(reference, shape, 5, **OPTIONS[options], damping_split=split)
    model.to(device)
    optimizer = torchium.KFAC(model, **OPTIONS[options], damping_split=split)
    for step in range(5):
        x, y = (t.to(device) for t in batch_of(shape, step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_each_close_in_norm(model.parameters(), reference.parameters(), 1e-8)


# Invariants


@ignore_fallback
@pytest.mark.parametrize(
    ("name", "sizes", "split"),
    in_turn(
        ["mlp", "tied", "tied_head", "convolutions", "deconvolutions"],
        [(4, 4), (1, 5, 2), (8,)],
        SPLITS,
    ),
)
def test_micro_batches_equal_one_batch(name, sizes, split, device):
    """Each brings its share of the mean loss, in a separate backward pass."""
    results = []
    for pieces in (sizes, (sum(sizes),)):
        model, shape = make_model(name)
        model.to(device)
        optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=1, damping_split=split)
        for step in range(3):
            x, y = (t.to(device) for t in batch_of(shape, step, sum(sizes)))
            optimizer.zero_grad()
            for part_x, part_y in zip(x.split(pieces), y.split(pieces), strict=True):
                loss = F.cross_entropy(model(part_x), part_y) * len(part_x) / len(x)
                loss.backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert_each_close_in_norm(*results, 1e-10)


@ignore_fallback
@pytest.mark.parametrize("name", ["mlp", "repeated", "tied_head", "convolutions", "deconvolutions"])
def test_a_sum_has_the_factors_of_the_mean(name, device):
    """batch_averaged states which of the two the loss is."""
    results = []
    for reduction in ("mean", "sum"):
        model, shape = make_model(name)
        model.to(device)
        scale = 1.0 if reduction == "mean" else 1 / 8
        optimizer = torchium.KFAC(
            model,
            batch_averaged=reduction == "mean",
            damping_split="exact",
            momentum=0.9,
            kl_clip=None,
            lr=0.1 * scale,  # the gradient is 8 times larger
            TCov=1,
        )
        for step in range(3):
            x, y = (t.to(device) for t in batch_of(shape, step, 8))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
        results.append([*factors_of(optimizer), *(p.detach() for p in model.parameters())])
    assert len(results[0]) > 6
    assert_each_close_in_norm(*results, 1e-10)


@ignore_fallback
@pytest.mark.parametrize("name", ["convolutions", "tied_head"])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_loss_scale_cancels(unscale, name, device):
    results = []
    for enabled in (False, True):
        model, shape = make_model(name)
        model.to(device)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=enabled)
        optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=1, grad_scaler=scaler)
        for step in range(3):
            x, y = (t.to(device) for t in batch_of(shape, step))
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # changes only V
            scaler.step(optimizer)
            scaler.update()
        results.append([*factors_of(optimizer), *(p.detach() for p in model.parameters())])
    assert_each_close_in_norm(*results, 1e-10)


def test_clipping_changes_the_gradient_and_not_the_factors():
    x, y = batch_of((4,), 0)
    steps, factors = [], []
    for clip in (None, 1e-3):
        model = mlp(4, 6, 3)
        optimizer = torchium.KFAC(model, **BARE)
        F.cross_entropy(model(x), y).backward()
        scale = 1.0
        if clip is not None:
            scale = clip / float(nn.utils.clip_grad_norm_(model.parameters(), clip))
        steps.append([d / scale for d in updates(model, optimizer)])
        factors.append(factors_of(optimizer))
    for pair in (steps, factors):
        assert_each_close_in_norm(*pair, 1e-5)


@pytest.mark.parametrize("layer", [lambda: nn.Linear(4, 3), lambda: nn.LayerNorm(4)])
def test_weight_decay_is_divided_by_the_damping_where_factors_are_zero(layer):
    """Each parameter has the decay of its own group, and the preconditioner of its weight."""
    model = layer().double()
    weight, bias = model.parameters()
    start = nn.init.normal_(weight).detach().clone(), nn.init.normal_(bias).detach().clone()
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias]}]
    optimizer = torchium.KFAC(groups, lr=0.003, damping=0.01, kl_clip=None, damping_split="exact")
    (0 * model(random(8, 4))).sum().backward()  # zero G
    optimizer.step()
    near = {"rtol": 1e-5, "atol": 1e-5}  # eps is the least eigenvalue
    kept = torch.full_like(weight, 1 - 0.003 * 0.1 / 0.01)
    torch.testing.assert_close(weight / start[0], kept, **near)
    torch.testing.assert_close(bias, start[1], **near)


# Another implementation


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("seed", "split"), [(s, SPLITS[s % 3]) for s in range(8)])
def test_directions_agree_with_curvlinops(seed, sharing, split, reduction):
    damping = 0.01
    model, x = random_network(seed)
    y = torch.arange(len(x)) % 3
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    options = {
        "pi": {"damping": damping, "use_heuristic_damping": True},
        "plain": {"damping": (damping**0.5, damping**0.5)},
        "exact": {"damping": damping, "use_exact_damping": True},
    }
    if reduction == "sum":  # curvlinops also sums the Fisher matrix over samples: G is N times ours
        options["exact"]["damping"] = damping * len(x)
        options["pi"]["damping"] = damping * len(x)
        options["plain"]["damping"] = (damping**0.5, damping**0.5 * len(x))
    optimizer = torchium.KFAC(
        model,
        damping=damping,
        eps=0.0,
        damping_split=split,
        weight_sharing=sharing,
        batch_averaged=reduction == "mean",
        **BARE,
    )
    loss_fn(model(x), y).backward()
    scale = 1.0 if reduction == "mean" else len(x)
    expected = curvlinops_directions(
        model, loss_fn, x, y, "empirical", sharing, options[split], scale
    )
    assert_each_close_in_norm(updates(model, optimizer), expected, 1e-6)
