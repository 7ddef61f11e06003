"""K-FAC of transposed convolutions: factors against sums over single positions, and steps against dense solves."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torchium
from kfac_problems import BARE, SPLITS, assert_close_in_norm, random
from optimizer_cases import ignore_fallback
from torch import Tensor, nn
from torch.nn import functional as F

# The layer and the shape of a sample.
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "signal": (nn.ConvTranspose1d(3, 2, 3, stride=2, padding=1, output_padding=1), (3, 4)),
    "groups": (nn.ConvTranspose2d(4, 6, (2, 3), stride=(2, 1), groups=2, bias=False), (4, 2, 3)),
    "dilation": (
        nn.ConvTranspose2d(2, 3, 2, dilation=(1, 3), padding=(0, 1), output_padding=(0, 2)),
        (2, 3, 2),
    ),
    "volume": (nn.ConvTranspose3d(2, 2, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 0)), (2, 2, 3, 2)),
    "gaps": (nn.ConvTranspose2d(2, 2, 1, stride=3, output_padding=2), (2, 2, 2)),
}  # fmt: skip


def layer_and_input(name: str, device: str, samples: int = 3) -> tuple[nn.Module, Tensor]:
    layer, shape = LAYERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layer = copy.deepcopy(layer)
        layer.reset_parameters()
    return layer.double().to(device), random(samples, *shape).to(device)


def positions(layer: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """x [groups, N, T, in/groups] and p [groups, N, T, out/groups * kernel], position by position.

    p is the gradient of the weight for an input that is 1 at one position of one channel.
    """
    N, groups = len(x), layer.groups
    T = x[0, 0].numel()
    inputs = x.flatten(2).unflatten(1, (groups, -1)).permute(1, 0, 3, 2)
    patches = []
    for group in range(groups):
        channel = group * (x.shape[1] // groups)
        for i in range(N):
            for t in range(T):
                one = torch.zeros_like(x[:1])
                one[0, channel].view(-1)[t] = 1
                y = type(layer).forward(layer, one)
                (of_weight,) = torch.autograd.grad((y * g[i : i + 1]).sum(), layer.weight)
                patches.append(of_weight[channel].flatten())
    return inputs, torch.stack(patches).view(groups, N, T, -1)


def dense_factors(
    layer: nn.Module, x: Tensor, g: Tensor, weight_sharing: str = "expand"
) -> tuple[Tensor, Tensor]:
    """A and G of gradients g of the losses of single samples."""
    inputs, p = positions(layer, x, g)
    if weight_sharing == "reduce":
        inputs, p = inputs.mean(2, keepdim=True), p.sum(2, keepdim=True)
    A = torch.einsum("gnti,gntj->gij", p, p) / len(x)
    G = torch.einsum("gnti,gntj->gij", inputs, inputs) / (len(x) * inputs.shape[2])
    return A, G


def loss_of(y: Tensor) -> Tensor:
    """A mean over the samples."""
    return torch.sin(y + 0.3).flatten(1).sum(1).mean()


def backward(layer: nn.Module, x: Tensor) -> Tensor:
    """The gradients of the losses of single samples at the outputs."""
    y = layer(x)
    y.retain_grad()
    loss_of(y).backward()
    return y.grad * len(x)


@ignore_fallback
@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", LAYERS)
def test_factors_are_sums_over_positions(name, weight_sharing, device):
    layer, x = layer_and_input(name, device)
    twin = copy.deepcopy(layer)
    optimizer = torchium.KFAC(layer, weight_sharing=weight_sharing, **BARE)
    g = backward(layer, x)
    optimizer.step()
    state = optimizer.state[layer.weight]
    A, G = dense_factors(twin, x, g, weight_sharing)
    assert_close_in_norm(state["A"], A, 1e-12)
    assert_close_in_norm(state["G"], G, 1e-12)


@ignore_fallback
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_is_a_dense_solve(name, split, device):
    damping = 0.05
    layer, x = layer_and_input(name, device)
    twin = copy.deepcopy(layer)
    optimizer = torchium.KFAC(layer, damping=damping, eps=0.0, damping_split=split, **BARE)
    g = backward(layer, x)
    V = layer.weight.grad.clone()
    optimizer.step()
    A, G = dense_factors(twin, x, g)
    expected = []
    for v, a, s in zip(V.view(len(A), G.shape[-1], -1), A, G, strict=True):
        eye_a, eye_s = (torch.eye(len(M), dtype=M.dtype, device=device) for M in (a, s))
        ratio = a.diagonal().mean() / s.diagonal().mean()
        pi = ratio.sqrt() if split == "pi" else 1.0
        if split == "exact":
            dense = torch.kron(s, a) + damping * torch.kron(eye_s, eye_a)
        else:
            dense = torch.kron(s + damping**0.5 / pi * eye_s, a + pi * damping**0.5 * eye_a)
        expected.append(torch.linalg.solve(dense, v.flatten()))
    step = (twin.weight - layer.weight).detach()
    assert_close_in_norm(step.flatten(), torch.cat(expected), 1e-9)


@ignore_fallback
@pytest.mark.parametrize("name", ["signal", "groups"])
@pytest.mark.parametrize("ekfac", [False, True])
def test_one_sample_and_one_position_have_the_exact_fisher_matrix(name, ekfac, device):
    """A is p p^T, and G x x^T: their product is that of the gradient with itself. EKFAC keeps it."""
    layer, x = layer_and_input(name, device, samples=1)
    x = x[(slice(None), slice(None), *[slice(0, 1)] * (x.dim() - 2))]
    options: dict[str, Any] = {"damping": 0.05, "eps": 1e-14, "damping_split": "exact", **BARE}
    optimizer = torchium.KFAC(layer, ekfac=ekfac, TCov=1, TInv=1, **options)
    for _ in range(2 if ekfac else 1):
        optimizer.zero_grad()
        backward(layer, x)
        before = layer.weight.detach().clone()
        optimizer.step()
    if ekfac:
        return  # its second step has other factors
    groups = layer.groups
    j = layer.weight.grad.reshape(groups, -1)
    for of_group, step in zip(j, (before - layer.weight).reshape(groups, -1), strict=True):
        eye = torch.eye(len(of_group), dtype=j.dtype, device=device)
        dense = torch.outer(of_group, of_group) + 0.05 * eye
        assert_close_in_norm(step.detach(), torch.linalg.solve(dense, of_group), 1e-8)


@ignore_fallback
@pytest.mark.parametrize("split", SPLITS)
def test_without_overlap_it_is_a_linear_layer(split, device):
    """One position: [in, out * kernel] is the weight of a linear layer [in, out]."""
    layer = nn.ConvTranspose2d(4, 3, (2, 3), bias=False).double().to(device)
    linear = nn.Linear(4, 18, bias=False).double().to(device)
    with torch.no_grad():
        linear.weight.copy_(layer.weight.view(4, 18).mT)
    results = []
    for model in (layer, linear):
        optimizer = torchium.KFAC(model, lr=0.1, TCov=1, TInv=2, damping_split=split)
        for step in range(4):
            x = random(5, 4, seed=step).to(device)
            optimizer.zero_grad()
            loss_of(model(x if model is linear else x.view(5, 4, 1, 1))).backward()
            optimizer.step()
        results.append(model.weight.detach())
    assert_close_in_norm(results[0].view(4, 18).mT, results[1], 1e-10)


@ignore_fallback
def test_update_curvature_takes_patches_of_every_column(device):
    """The Gauss-Newton matrix of the sum of squares: H is 2, so that g is a unit vector each time."""
    layer, x = layer_and_input("signal", device, samples=2)
    twin = copy.deepcopy(layer)
    optimizer = torchium.KFAC(layer, fisher="ggn", **BARE)
    y = layer(x)
    optimizer.update_curvature(y, "mse", reduction="sum")
    y.square().sum().backward()
    optimizer.step()
    expected = 0.0
    for k in range(y[0].numel()):
        g = torch.zeros_like(y)
        g.flatten(1)[:, k] = 2**0.5
        expected = expected + dense_factors(twin, x, g.detach())[0]
    state = optimizer.state[layer.weight]
    assert_close_in_norm(state["A"], expected, 1e-12)
    assert_close_in_norm(state["G"], dense_factors(twin, x, torch.zeros_like(y))[1], 1e-12)


def test_the_bias_falls_back_with_a_reason(device):
    layer, x = layer_and_input("signal", device)
    optimizer = torchium.KFAC(layer, **BARE)
    bias = layer.bias.detach().clone()
    backward(layer, x)
    with pytest.warns(UserWarning, match="the bias of a transposed convolution"):
        optimizer.step()
    assert torch.equal(layer.bias, bias - layer.bias.grad)
    assert optimizer.report()["parameters"] == {
        "weight": ("factors", "A 6, G 3"),
        "bias": (
            "fallback",
            "the bias of a transposed convolution, whose factors have no row for it",
        ),
    }


@pytest.mark.parametrize("solver", ["cholesky", "eigh", "newton", "inverse_free", "preconditioner"])
def test_a_deconvolution_autoencoder_trains(solver, device):
    """A decoder like that of DCGAN; SGD needs more steps."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 4, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(96, 8),
        nn.Linear(8, 32), nn.Unflatten(1, (8, 2, 2)),
        nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1, bias=False), nn.GroupNorm(2, 6), nn.Tanh(),
        nn.ConvTranspose2d(6, 1, 4, stride=2, padding=1),
    ).to(device)  # fmt: skip
    angles = torch.linspace(0, 3, 64, device=device)[:, None, None]
    grid = torch.linspace(-1, 1, 8, device=device)
    x = torch.tanh(4 * (grid[:, None] * angles.cos() + grid * angles.sin()))[:, None]

    def final_loss(make: Any) -> float:
        trained = copy.deepcopy(model)
        optimizers = make(trained)
        for _ in range(40):
            loss = F.mse_loss(trained(x), x)
            optimizers[-1].zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        return loss.item()

    def kfac(trained: nn.Module) -> list[Any]:
        if solver == "preconditioner":
            sgd = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
            return [torchium.KFACPreconditioner(trained, lr=0.1, factor_update_steps=1), sgd]
        return [torchium.KFAC(trained, lr=0.1, TCov=1, solver=solver)]

    def sgd(trained: nn.Module) -> list[Any]:
        return [torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = final_loss(kfac)
    # K and C of the inverse-free solver begin as the identity: its first steps are those of SGD.
    assert ours < (0.8 if solver == "inverse_free" else 0.5) * final_loss(sgd)
