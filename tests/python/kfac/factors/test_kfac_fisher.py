"""K-FAC with fisher="ggn" and "mc": factors from the curvature of the loss, by update_curvature().

Against dense float64 Gauss-Newton matrices, PyTorch's own Hessians of its losses, and curvlinops.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchium
from combinations import in_turn
from cuda_waits import no_waits
from curvature_losses import FISHERS, LOSSES, binary, losses
from kfac_problems import (
    BARE,
    MODELS,
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
from torch import Tensor, nn
from torch.nn import functional as F


def train(
    model: nn.Module, optimizer: Any, shape: tuple[int, ...], steps: int, first: int = 0
) -> None:
    device = next(model.parameters()).device
    for step in range(first, first + steps):
        x, y = (t.to(device) for t in batch_of(shape, step))
        optimizer.zero_grad()
        outputs = model(x)
        generator = torch.Generator(device).manual_seed(step)
        optimizer.update_curvature(outputs, "cross_entropy", generator=generator)
        F.cross_entropy(outputs, y).backward()
        optimizer.step()


# Against dense matrices


OPTIONS: dict[str, dict[str, Any]] = {
    "schedules": {"lr": 0.1, "TCov": 2, "TInv": 3, "stat_decay": 0.6},
    "every_step": {"lr": 0.1, "TCov": 1, "TInv": 1, "weight_decay": 0.01},
    "diagonals": {"lr": 0.1, "TCov": 1, "TInv": 2, "max_factor_size": 5},
    "reduce": {"lr": 0.1, "TCov": 1, "TInv": 2, "weight_sharing": "reduce"},
}


@ignore_fallback
@pytest.mark.parametrize(("name", "options", "split"), in_turn(MODELS, OPTIONS, SPLITS))
def test_training_follows_the_reference(name, options, split, device):
    model, shape = make_model(name)
    twin = copy.deepcopy(model)
    train_reference(twin, shape, 4, fisher="ggn", damping_split=split, **OPTIONS[options])
    model.to(device)
    optimizer = torchium.KFAC(model, fisher="ggn", damping_split=split, **OPTIONS[options])
    train(model, optimizer, shape, 4)
    assert_each_close_in_norm(model.parameters(), twin.parameters(), 1e-8)


def dense_ggn(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """J^T H J for each weight, with the bias as last column, H the Hessian of loss(model(x))."""
    named = dict(model.named_parameters())
    J = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, x))(named)
    f = model(x).detach()
    H = torch.autograd.functional.hessian(loss, f).reshape(f.numel(), f.numel())
    blocks = []
    for name in [n for n in named if n.endswith("weight")]:
        columns = J[name].reshape(f.numel(), len(named[name]), -1)
        bias = name.removesuffix("weight") + "bias"
        if bias in named:
            columns = torch.cat([columns, J[bias].reshape(f.numel(), -1, 1)], -1)
        Jw = columns.flatten(1)
        blocks.append(Jw.mT @ H @ Jw)
    return blocks


def kronecker_blocks(model: nn.Module, optimizer: torchium.KFAC) -> list[Tensor]:
    states = [optimizer.state[p] for n, p in model.named_parameters() if n.endswith("weight")]
    return [torch.kron(state["G"][0], state["A"][0]) for state in states]


@losses
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_sample_has_the_exact_blocks(reduction, loss, device):
    model = mlp(4, 5, 3).to(device)
    function, target = LOSSES[loss]
    x = random(1, 4).to(device)
    optimizer = torchium.KFAC(model, fisher="ggn", **BARE)
    outputs = model(x)
    optimizer.update_curvature(outputs, loss, reduction=reduction)
    y = target(outputs.detach())
    function(outputs, y, reduction=reduction).backward()
    expected = dense_ggn(model, x, lambda f: function(f, y, reduction=reduction))
    optimizer.step()
    # the step has changed the weights, not the factors
    assert_each_close_in_norm(kronecker_blocks(model, optimizer), expected, 1e-10)


@pytest.mark.parametrize("bias", [True, False])
def test_a_deep_linear_net_has_the_exact_blocks(bias, device):
    """With squared error the later layers have one Jacobian for all samples."""
    model = nn.Sequential(*(nn.Linear(n, m, bias=bias) for n, m in [(4, 5), (5, 6), (6, 3)]))
    model.double().to(device)
    x, y = random(7, 4).to(device), random(7, 3, seed=1).to(device)
    optimizer = torchium.KFAC(model, fisher="ggn", **BARE)
    outputs = model(x)
    optimizer.update_curvature(outputs, "mse")
    F.mse_loss(outputs, y).backward()
    expected = dense_ggn(model, x, lambda f: F.mse_loss(f, y))
    optimizer.step()
    assert_each_close_in_norm(kronecker_blocks(model, optimizer), expected, 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_step_solves_linear_regression(reduction, device):
    """For any labels; reduction: over the outputs of a sample, whose losses are averaged."""
    x, y = random(20, 4).to(device), random(20, 3, seed=1).to(device)
    model = nn.Linear(4, 3).double().to(device)
    options = {"damping": 0.0, "eps": 1e-14, "damping_split": "exact", **BARE}
    optimizer = torchium.KFAC(model, fisher="ggn", **options)
    outputs = model(x)
    optimizer.update_curvature(outputs, "mse", reduction=reduction)
    loss = F.mse_loss(outputs, y)
    (loss if reduction == "mean" else 3 * loss).backward()
    optimizer.step()
    with_ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    solution = torch.linalg.lstsq(with_ones, y).solution
    assert_close_in_norm(torch.cat([model.weight.mT, model.bias[None]]), solution, 1e-10)


def layout_cases() -> dict[str, tuple[nn.Module, Tensor, str, dict[str, Any]]]:
    """A layer, whose outputs are those of the model, its input, the loss and options."""
    linear, convolution = nn.Linear(3, 4).double(), nn.Conv2d(2, 4, 2).double()
    images, sequences = random(5, 2, 3, 4), random(5, 2, 3)
    return {
        "classes_last": (linear, sequences, "cross_entropy", {"class_dim": -1}),
        "classes_second": (convolution, images, "cross_entropy", {"class_dim": 1}),
        "mse_sequences": (linear, sequences, "mse", {}),
        "mse_images": (convolution, images, "mse", {}),
        "bce_sequences": (linear, sequences, "bce", {}),
    }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", layout_cases())
def test_layouts_reductions_and_masks(case, reduction, masked, device):
    """G of the last layer is the sum of the diagonal blocks of the Hessian of torch's loss."""
    layer, x, loss, options = layout_cases()[case]
    layer, x = layer.to(device), x.to(device)
    batch_averaged = reduction == "mean"
    optimizer = torchium.KFAC(layer, fisher="ggn", batch_averaged=batch_averaged, **BARE)
    outputs = layer(x)
    class_dim = options.get("class_dim")
    shape = list(outputs.shape)
    if class_dim is not None:
        shape.pop(class_dim)
    kept = torch.arange(torch.Size(shape).numel(), device=device).view(shape) % 3 != 1

    def torch_loss(f: Tensor) -> Tensor:
        if loss == "cross_entropy":
            targets = torch.zeros(shape, dtype=torch.long, device=device)
            targets = targets.masked_fill(~kept, -100) if masked else targets
            return F.cross_entropy(f.movedim(class_dim, 1), targets, reduction=reduction)
        ones = torch.ones_like(f)
        function = F.mse_loss if loss == "mse" else binary
        each = function(f, ones, reduction="none")
        each = each[kept] if masked else each
        return each.mean() if reduction == "mean" else each.sum()

    optimizer.update_curvature(
        outputs, loss, reduction=reduction, mask=kept if masked else None, **options
    )
    outputs.sum().backward()
    optimizer.step()
    f = outputs.detach()
    H = torch.autograd.functional.hessian(torch_loss, f)
    channels = 1 if case in ("classes_second", "mse_images") else f.dim() - 1  # of the layer
    H = H.movedim((channels, f.dim() + channels), (-2, -1))
    places = f.numel() // f.shape[channels]
    H = H.reshape(places, places, f.shape[channels], f.shape[channels])
    expected = H.diagonal(dim1=0, dim2=1).sum(-1)
    if reduction == "sum":  # G is a mean over the samples
        expected = expected / len(x)
    assert_close_in_norm(optimizer.state[layer.weight]["G"][0], expected, 1e-10)


def test_tokens_may_be_samples(device):
    """Flattened outputs have the same factors if no layer mixes positions."""
    factors = []
    for flat in (False, True):
        model = mlp(3, 5, 4).to(device)
        optimizer = torchium.KFAC(model, fisher="ggn", **BARE)
        outputs = model(random(6, 2, 3).to(device))
        outputs = outputs.flatten(0, 1) if flat else outputs
        optimizer.update_curvature(outputs, "cross_entropy", class_dim=-1)
        outputs.sum().backward()
        optimizer.step()
        factors.append(factors_of(optimizer))
    assert_each_close_in_norm(*factors, 1e-10)


# Sampled targets


@losses
def test_sampled_targets_have_the_curvature_as_mean(loss, device):
    """The error of G falls as the root of the number of samples."""
    x = random(4, 3).to(device)
    of_kind = {}
    for fisher, samples in [("ggn", 1), ("mc", 50), ("mc", 5000)]:
        model = mlp(3, 5, 3).to(device)
        optimizer = torchium.KFAC(model, fisher=fisher, **BARE)
        generator = torch.Generator(device).manual_seed(3)
        outputs = model(x)
        optimizer.update_curvature(outputs, loss, samples=samples, generator=generator)
        outputs.sum().backward()
        optimizer.step()
        of_kind[fisher, samples] = factors_of(optimizer)
    exact = of_kind.pop(("ggn", 1))
    for (_, samples), factors in of_kind.items():
        for name, ours, expected in zip("AGAG", factors, exact, strict=True):
            error = (ours - expected).norm() / expected.norm()
            assert error == 0 if name == "A" else 0 < error < 4 / samples**0.5


def test_a_generator_determines_the_targets(device):
    model, shape = make_model("mlp")
    model.to(device)
    x, y = (t.to(device) for t in batch_of(shape, 0, 32))
    found = []
    for seed in (1, 1, 2):
        optimizer = torchium.KFAC(model, fisher="mc", lr=0.0)
        model.zero_grad()
        outputs = model(x)
        generator = torch.Generator(device).manual_seed(seed)
        before = torch.get_rng_state()
        optimizer.update_curvature(outputs, "cross_entropy", generator=generator)
        assert torch.equal(torch.get_rng_state(), before)
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
        found.append(factors_of(optimizer)[1])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


# The passes


@ignore_fallback
@pytest.mark.parametrize("first", ["update", "backward"])
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_loss_alone(name, fisher, first, device):
    gradients = []
    for with_curvature in (False, True):
        model, shape = make_model(name)
        model.to(device)
        x, y = (t.to(device) for t in batch_of(shape, 0))
        optimizer = torchium.KFAC(model, fisher=fisher)
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        if with_curvature and first == "update":
            optimizer.update_curvature(outputs, "cross_entropy")
            assert all(p.grad is None for p in model.parameters())
        loss.backward(retain_graph=first == "backward")
        if with_curvature and first == "backward":
            optimizer.update_curvature(outputs, "cross_entropy")
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
        if with_curvature:
            optimizer.step()
            assert optimizer.report()["preconditioned"]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            # A GPU's convolutions may add in another order in each run.
            tolerance = 0 if device == "cpu" else 1e-12
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@ignore_fallback
@pytest.mark.parametrize("name", ["mlp", "repeated", "tied", "tied_head", "convolutions"])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 5, 2)])
def test_micro_batches_equal_one_batch(name, sizes, device):
    results = []
    for pieces in (sizes, (8,)):
        model, shape = make_model(name)
        model.to(device)
        optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=1, fisher="ggn")
        for step in range(2):
            x, y = (t.to(device) for t in batch_of(shape, step, 8))
            optimizer.zero_grad()
            for part_x, part_y in zip(x.split(pieces), y.split(pieces), strict=True):
                outputs = model(part_x)
                optimizer.update_curvature(outputs, "cross_entropy")
                (F.cross_entropy(outputs, part_y) * len(part_x) / len(x)).backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert_each_close_in_norm(*results, 1e-10)


def test_curvature_of_several_passes_is_their_mean(device):
    """Also if gradients were set to None in between, which empirical factors follow."""
    model = nn.Linear(4, 3).double().to(device)
    optimizer = torchium.KFAC(model, fisher="ggn", **BARE)
    for size in (2, 6):
        model.weight.grad = model.bias.grad = None
        outputs = model(random(size, 4, seed=size).to(device))
        optimizer.update_curvature(outputs, "cross_entropy")
        outputs.square().mean().backward()
    optimizer.step()
    x = torch.cat([random(2, 4, seed=2), random(6, 4, seed=6)])
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    assert_close_in_norm(optimizer.state[model.weight]["A"][0].cpu(), x.mT @ x / 8, 1e-12)


def test_sampled_curvature_does_not_wait(device):
    if device.type != "cuda":
        pytest.skip("a CPU has no waits")
    model = mlp(6, 8, 3).float().to(device)
    optimizer = torchium.KFAC(model, fisher="mc", TCov=1, TInv=100)
    x = torch.randn(16, 6, device=device)
    mask = torch.ones(16, dtype=torch.bool, device=device)
    for step in range(4):
        optimizer.zero_grad()
        outputs = model(x)
        if step == 3:
            with no_waits():
                for loss in LOSSES:
                    optimizer.update_curvature(outputs, loss, mask=mask if loss[0] == "c" else None)
        else:
            optimizer.update_curvature(outputs, "cross_entropy", mask=mask)
        outputs.sum().backward()
        optimizer.step()


def test_half_precision_outputs(device):
    """Under autocast the factors are those of float32 up to the rounding of bfloat16."""
    factors = []
    for enabled in (False, True):
        model = mlp(4, 6, 3).float().to(device)
        optimizer = torchium.KFAC(model, fisher="ggn")
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            outputs = model(random(16, 4).float().to(device))
            optimizer.update_curvature(outputs, "cross_entropy")
        assert outputs.dtype == (torch.bfloat16 if enabled else torch.float32)
        outputs.float().sum().backward()
        optimizer.step()
        factors.append(factors_of(optimizer))
    for ours, theirs in zip(*factors, strict=True):
        assert ours.dtype == torch.float32
        assert_close_in_norm(ours, theirs, 0.03)


def test_checkpointed_layers(device):
    """Non-reentrant checkpoints compute the inputs of their layers again."""
    factors = []
    for checkpointed in (False, True):
        model = mlp(4, 5, 5, 3).to(device)
        optimizer = torchium.KFAC(model, fisher="ggn")
        x = random(6, 4).to(device)
        if checkpointed:
            hidden = torch.utils.checkpoint.checkpoint(model[:4], x, use_reentrant=False)
            outputs = model[4](hidden)
        else:
            outputs = model(x)
        optimizer.update_curvature(outputs, "cross_entropy")
        F.cross_entropy(outputs, torch.arange(6, device=device) % 3).backward()
        optimizer.step()
        factors.append(factors_of(optimizer))
    assert len(factors[1]) == 6
    assert_each_close_in_norm(*factors, 1e-10)


# The option


@ignore_fallback
@pytest.mark.parametrize("fisher", FISHERS)
def test_the_option_may_change_in_mid_run(fisher, device):
    model, shape = make_model("tied_head")
    model.to(device)
    optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=1)
    x, y = (t.to(device) for t in batch_of(shape, 0))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    k = [s["factor_updates"].item() for s in optimizer.state.values() if "A" in s]
    for group in optimizer.param_groups:
        group["fisher"] = fisher
    train(model, optimizer, shape, 2, first=1)
    for group in optimizer.param_groups:
        group["fisher"] = "empirical"
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    after = [s["factor_updates"].item() for s in optimizer.state.values() if "A" in s]
    assert [n + 3 for n in k] == after


# Another implementation


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("seed", range(6))
def test_directions_agree_with_curvlinops(seed, sharing, loss):
    damping = 0.01
    model, x = random_network(seed)
    loss_fn, y = nn.CrossEntropyLoss(), torch.arange(len(x)) % 3
    if loss == "mse":
        loss_fn, y = nn.MSELoss(), random(len(x), 3, seed=1)
    options = {"damping": damping, "eps": 0.0, "damping_split": "exact", **BARE}
    optimizer = torchium.KFAC(model, fisher="ggn", weight_sharing=sharing, **options)
    outputs = model(x)
    optimizer.update_curvature(outputs, loss)
    loss_fn(outputs, y).backward()
    exact = {"damping": damping, "use_exact_damping": True}
    expected = curvlinops_directions(model, loss_fn, x, y, "type-2", sharing, exact)
    assert_each_close_in_norm(updates(model, optimizer), expected, 1e-6)


# A loss that compares samples


class Towers(nn.Module):
    """Similarities [images, texts], as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Linear(5, 3, bias=False, dtype=torch.float64)
        self.text = nn.Linear(6, 3, bias=False, dtype=torch.float64)

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        return 2 * self.image(images) @ self.text(texts).mT


@pytest.mark.parametrize(
    ("fisher", "samples", "tolerance", "of_text"),
    [("ggn", 1, 1e-12, False), ("mc", 1000, 0.05, True)],
)
def test_curvature_of_similarities(fisher, samples, tolerance, of_text):
    """`ggn` has cross terms of samples in the text tower, whose rows reach all outputs; `mc` has none."""
    model = Towers()
    images, texts = random(4, 5), random(4, 6)
    optimizer = torchium.KFAC(model, fisher=fisher)
    similarities = model(images, texts)
    generator = torch.Generator().manual_seed(1)
    optimizer.update_curvature(similarities, "cross_entropy", samples=samples, generator=generator)
    F.cross_entropy(similarities, torch.arange(4)).backward()
    rows = model.image(images).detach(), model.text(texts).detach()
    optimizer.step()
    J = torch.autograd.functional.jacobian(lambda image, text: 2 * image @ text.mT, rows)
    p = similarities.detach().softmax(1)
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    wanted = [torch.einsum("ncrk,ncd,ndrl->kl", j, H, j) / 4 for j in J]
    G = [optimizer.state[tower.weight]["G"][0] for tower in (model.image, model.text)]
    errors = [float((g - w).norm() / w.norm()) for g, w in zip(G, wanted, strict=True)]
    assert errors[0] < tolerance
    assert (errors[1] < tolerance) == of_text
