"""NaturalGradient with fisher="ggn" and "mc": the curvature of the loss, by update_curvature().

Against dense float64 Gauss-Newton matrices by torch.func, PyTorch's Hessians, and curvlinops.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchium
from captured_layers import MODELS, model_and_batch
from cuda_waits import no_waits
from reference import ReferenceNaturalGradient, gauss_newton
from torch import Tensor, nn
from torch.nn import functional as F

SOLVERS = ["gram", "explicit", "cg"]
FISHERS = ["ggn", "mc"]
NAMES = sorted(MODELS.keys() - {"two_tables"})


def binary(f: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(f, y.expand_as(f).double(), **options)


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "cross_entropy": (
        F.cross_entropy,
        lambda f: torch.arange(len(f), device=f.device) % f.shape[1],
    ),
    "mse": (F.mse_loss, lambda f: torch.ones_like(f)),
    "bce": (binary, lambda f: torch.ones_like(f)),
}
losses = pytest.mark.parametrize("loss", LOSSES)


def dense_ggn(model: nn.Module, x: Tensor, loss: str) -> Tensor:
    """[P, P], with J by torch.func and the Hessians of torch's loss of every sample."""
    function, target = LOSSES[loss]
    named = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, x))(named)
    f = model(x).detach()
    J = torch.cat([j.flatten(2) for j in jacobians.values()], 2)
    y = target(f)
    H = [
        torch.autograd.functional.hessian(lambda o, i=i: function(o[None], y[i : i + 1]), f[i])
        for i in range(len(f))
    ]
    return gauss_newton(J, torch.stack(H))


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten().cpu().double() for t in tensors])


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def assert_near(ours: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.norm() > 0
    assert (ours - expected).norm() <= tolerance * expected.norm()


def backward(
    optimizer: Any, model: nn.Module, x: Tensor, loss: str = "cross_entropy", **options: Any
) -> None:
    function, target = LOSSES[loss]
    optimizer.zero_grad()
    outputs = model(x)
    optimizer.update_curvature(outputs, loss, **options)
    function(outputs, target(outputs)).backward()


def train(optimizer: Any, model: nn.Module, name: str, steps: int, first: int = 0) -> None:
    p = next(model.parameters())
    for seed in range(first, first + steps):
        x, _ = model_and_batch(name, seed=seed, device=p.device, dtype=p.dtype)[1]
        generator = torch.Generator(p.device).manual_seed(seed)
        backward(optimizer, model, x, generator=generator)
        optimizer.step()


# ---- against dense matrices


@losses
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_direction_is_the_dense_solve(name, solver, loss, device):
    model, (x, _) = model_and_batch(name, samples=4, device=device)
    damping, before = 1e-2, flat(trained(model))
    matrix = dense_ggn(copy.deepcopy(model).cpu(), x.cpu(), loss)
    optimizer = torchium.NaturalGradient(
        model, lr=1.0, damping=damping, solver=solver, fisher="ggn", eps=1e-13
    )
    backward(optimizer, model, x, loss)
    v = flat(p.grad for p in trained(model))
    optimizer.step()
    expected = torch.linalg.solve(matrix + damping * torch.eye(len(v)).double(), v)
    assert_near(before - flat(trained(model)), expected, 1e-8)
    report = optimizer.report()
    assert (report["solver"], report["samples"]) == (solver, 4)
    assert report["rows"] == 4 * model(x)[0].numel()


OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "update_freq": {"update_freq": 3, "momentum": 0.0},
    "update_freq_momentum": {"update_freq": 2, "momentum": 0.5, "max_norm": 0.3},
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["mlp", "convolutions", "tied_embedding"])
def test_a_run_follows_the_reference(name, options, solver, device):
    settings = {"lr": 0.1, "damping": 0.1, **OPTIONS[options]}
    model, _ = model_and_batch(name, device=device)
    twin = model_and_batch(name)[0]
    before = flat(twin.parameters())
    reference = ReferenceNaturalGradient(twin.parameters(), **settings)
    optimizer = torchium.NaturalGradient(model, solver=solver, fisher="ggn", eps=1e-13, **settings)
    for seed in range(5):
        x, _ = model_and_batch(name, seed=seed)[1]
        backward(optimizer, model, x.to(device))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.cpu()
        optimizer.step()
        reference.step_with(dense_ggn(twin, x, "cross_entropy"))
    assert_near(flat(model.parameters()) - before, flat(twin.parameters()) - before, 1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_step_solves_linear_regression(solver, device):
    model = nn.Linear(4, 3).double().to(device)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, k, generator=generator).double().to(device) for k in (4, 3))
    optimizer = torchium.NaturalGradient(
        model, lr=1.0, damping=1e-10, momentum=0, fisher="ggn", solver=solver, eps=1e-14
    )
    outputs = model(x)
    optimizer.update_curvature(outputs, "mse")
    F.mse_loss(outputs, y).backward()
    optimizer.step()
    with_ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    solution = torch.linalg.lstsq(with_ones, y).solution
    assert_near(flat([model.weight.mT, model.bias]), flat([solution]), 1e-5)


def test_a_step_of_a_linear_classifier_is_one_of_newton(device):
    """Its Gauss-Newton matrix is the Hessian."""
    model, damping = nn.Linear(4, 3).double().to(device), 1e-4
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double().to(device)
    y = torch.arange(12, device=device) % 3

    def loss(theta: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, theta[:12].view(3, 4), theta[12:]), y)

    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    H = torch.autograd.functional.hessian(loss, theta)
    v = torch.autograd.functional.jacobian(loss, theta)
    newton = torch.linalg.solve(H + damping * torch.eye(15).to(H), v)
    optimizer = torchium.NaturalGradient(model, lr=1.0, damping=damping, fisher="ggn")
    backward(optimizer, model, x)
    optimizer.step()
    assert_near(flat([theta]) - flat(model.parameters()), flat([newton]), 1e-9)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("name", ["mlp", "convolutions"])
def test_directions_agree_with_curvlinops(name, loss):
    curvlinops = pytest.importorskip("curvlinops")
    model, (x, y) = model_and_batch(name)
    loss_fn: nn.Module = nn.CrossEntropyLoss()
    if loss == "mse":
        loss_fn, y = nn.MSELoss(), LOSSES["mse"][1](model(x).detach())
    params, damping = list(model.parameters()), 0.01
    operator = curvlinops.GGNLinearOperator(model, loss_fn, params, [(x, y)])
    before = flat(params)
    optimizer = torchium.NaturalGradient(model, lr=1.0, damping=damping, fisher="ggn")
    outputs = model(x)
    optimizer.update_curvature(outputs, loss)
    loss_fn(outputs, y).backward()
    v = [p.grad for p in params]
    matvec = [p.detach().clone() for p in params]
    optimizer.step()
    d = before - flat(params)
    first = 0
    parts = []
    for p in params:
        parts.append(d[first : first + p.numel()].view_as(p))
        first += p.numel()
    with torch.no_grad():  # the operator reads the parameters
        for p, old in zip(params, matvec, strict=True):
            p.copy_(old)
    assert_near(flat(operator @ parts) + damping * d, flat(v), 1e-6)


# ---- sampled targets


@losses
def test_sampled_targets_have_the_curvature_as_mean(loss, device):
    """With a large damping D the direction is v / D - F v / D^2: its error is that of F."""
    directions = {}
    for fisher, samples in [("ggn", 1), ("mc", 20), ("mc", 2000)]:
        model, (x, _) = model_and_batch("mlp", samples=4, device=device)
        optimizer = torchium.NaturalGradient(
            model, lr=1.0, damping=1e3, fisher=fisher, solver="explicit"
        )
        before = flat(model.parameters())
        generator = torch.Generator(device).manual_seed(3)
        backward(optimizer, model, x, loss, samples=samples, generator=generator)
        v = flat(p.grad for p in model.parameters())
        optimizer.step()
        directions[fisher, samples] = v - 1e3 * (before - flat(model.parameters()))
        assert optimizer.report()["rows"] == 4 * (samples if fisher == "mc" else 3)
    exact = directions.pop(("ggn", 1))
    for (_, samples), found in directions.items():
        assert 0 < (found - exact).norm() < 4 / samples**0.5 * exact.norm()


# ---- the passes


@pytest.mark.parametrize("first", ["update", "backward"])
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_loss_alone(name, fisher, first, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # two runs are compared
    gradients = []
    for with_curvature in (False, True):
        model, (x, y) = model_and_batch(name, device=device)
        optimizer = torchium.NaturalGradient(model, fisher=fisher)
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        if with_curvature and first == "update":
            optimizer.update_curvature(outputs, "cross_entropy")
            assert all(p.grad is None for p in trained(model))
        loss.backward(retain_graph=first == "backward")
        if with_curvature and first == "backward":
            optimizer.update_curvature(outputs, "cross_entropy")
        gradients.append([p.grad for p in trained(model)])
        if with_curvature:
            optimizer.step()
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["mlp", "shared_everywhere", "tied_embedding"])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 5, 2)])
def test_micro_batches_equal_one_batch(name, sizes, solver, device):
    results = []
    for pieces in (sizes, (8,)):
        model, (x, y) = model_and_batch(name, samples=8, device=device)
        optimizer = torchium.NaturalGradient(
            model, damping=0.1, solver=solver, fisher="ggn", eps=1e-13
        )
        for _ in range(2):
            optimizer.zero_grad()
            for part_x, part_y in zip(x.split(pieces), y.split(pieces), strict=True):
                outputs = model(part_x)
                optimizer.update_curvature(outputs, "cross_entropy")
                (F.cross_entropy(outputs, part_y) * len(part_x) / len(x)).backward()
            optimizer.step()
        results.append(flat(model.parameters()))
        assert optimizer.report()["samples"] == 8
    assert_near(*results, 1e-10)


def test_steps_that_keep_their_matrix_take_no_passes(device):
    model, (x, y) = model_and_batch("mlp", device=device)
    optimizer = torchium.NaturalGradient(model, fisher="ggn", update_freq=3)
    passes = []
    for _ in range(7):
        optimizer.zero_grad()
        outputs = model(x)
        count = [0]
        outputs.register_hook(lambda g, count=count: count.__setitem__(0, count[0] + 1))
        optimizer.update_curvature(outputs, "cross_entropy")
        passes.append(count[0])
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
    assert passes == [3, 0, 0, 3, 0, 0, 3]  # one per class


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_without_curvature_raises_and_changes_nothing(steps, fisher, device):
    model, (x, y) = model_and_batch("mlp", device=device)
    optimizer = torchium.NaturalGradient(model, fisher=fisher, update_freq=2)
    train(optimizer, model, "mlp", steps)
    optimizer.zero_grad()
    outputs = model(x)
    F.cross_entropy(outputs, y).backward(retain_graph=True)
    before = copy.deepcopy([list(model.parameters()), optimizer.state_dict()["state"]])
    with pytest.raises(RuntimeError, match=r"call it with the outputs of the model in each iter"):
        optimizer.step()
    after = [list(model.parameters()), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    optimizer.update_curvature(outputs, "cross_entropy")  # the remedy
    optimizer.step()
    assert not torch.equal(model[0].weight, before[0][0])


def test_zero_grad_forgets_the_curvature(device):
    model = nn.Linear(4, 3).to(device)
    optimizer = torchium.NaturalGradient(model, fisher="ggn")
    outputs = model(torch.ones(2, 4, device=device))
    optimizer.update_curvature(outputs, "mse")
    optimizer.zero_grad()
    outputs.sum().backward()
    with pytest.raises(RuntimeError, match="after zero_grad"):
        optimizer.step()


def test_errors_of_the_graph(device):
    model = nn.Linear(4, 3).to(device)
    optimizer = torchium.NaturalGradient(model, fisher="ggn")
    x = torch.ones(2, 4, device=device)
    outputs = model(x)
    outputs.sum().backward(retain_graph=True)
    x += 1
    with pytest.raises(RuntimeError, match="changed in place after the layer had used it"):
        optimizer.update_curvature(outputs, "mse")
    outputs = model(x)
    outputs.sum().backward()
    with pytest.raises(RuntimeError, match=r"call update_curvature\(\) before it"):
        optimizer.update_curvature(outputs, "mse")
    outputs = model(x)
    optimizer.update_curvature(outputs, "mse")
    outputs.sum().backward()
    x += 1
    with pytest.raises(ValueError, match=r"linear layer was changed in place"):
        optimizer.step()


def test_a_parameter_that_the_outputs_do_not_reach_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    optimizer = torchium.NaturalGradient(model, fisher="ggn")
    hidden = model[0](torch.ones(2, 4))
    optimizer.update_curvature(hidden, "mse")
    model[1](hidden).sum().backward()
    with pytest.raises(ValueError, match=r"gradient of parameter '1.weight'"):
        optimizer.step()


def test_mixed_samples_are_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False))
    optimizer = torchium.NaturalGradient(model, fisher="ggn")
    backward(optimizer, model, torch.randn(5, 4), "mse")
    with pytest.raises(ValueError, match="normalised with the statistics of the batch"):
        optimizer.step()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("update_freq", [1, 2])
def test_a_loss_scale_does_not_matter(unscale, update_freq, device):
    results = []
    for scaled in (False, True):
        model, _ = model_and_batch("convolutions", device=device)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=scaled)
        optimizer = torchium.NaturalGradient(
            model, damping=0.1, fisher="ggn", update_freq=update_freq
        )
        for seed in range(3):
            x, y = model_and_batch("convolutions", seed=seed, device=device)[1]
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.update_curvature(outputs, "cross_entropy")
            scaler.scale(F.cross_entropy(outputs, y)).backward()
            if unscale:
                scaler.unscale_(optimizer)  # without grad_scaler=
            scaler.step(optimizer)
            scaler.update()
        results.append(flat(model.parameters()))
    assert_near(*results, 1e-10)


@pytest.mark.parametrize("fisher", FISHERS)
def test_a_first_step_of_zeros_creates_the_state(fisher, device):
    model, _ = model_and_batch("mlp", device=device)
    optimizer = torchium.NaturalGradient(model, fisher=fisher)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all("momentum_buffer" in optimizer.state[p] for p in model.parameters())


def test_curvature_does_not_wait(device):
    if device.type != "cuda":
        pytest.skip("a CPU has no waits")
    model, (x, y) = model_and_batch("mlp", dtype=torch.float32, device=device)
    for fisher in FISHERS:
        optimizer = torchium.NaturalGradient(model, fisher=fisher, solver="gram")
        for step in range(4):
            optimizer.zero_grad()
            outputs = model(x)
            if step == 3:
                with no_waits():
                    optimizer.update_curvature(outputs, "cross_entropy")
                    F.cross_entropy(outputs, y).backward()
                    optimizer.step()
            else:
                optimizer.update_curvature(outputs, "cross_entropy")
                F.cross_entropy(outputs, y).backward()
                optimizer.step()


# ---- the option


@pytest.mark.parametrize("fisher", FISHERS)
def test_the_option_may_change_in_mid_run(fisher, device):
    model, (x, y) = model_and_batch("mlp", device=device)
    optimizer = torchium.NaturalGradient(model)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.param_groups[0]["fisher"] = fisher
    train(optimizer, model, "mlp", 2)
    optimizer.param_groups[0]["fisher"] = "empirical"
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.report()["rows"] == 5


def test_the_option_is_the_same_in_all_groups():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    groups = [{"params": model[0].parameters(), "fisher": "mc"}, {"params": model[1].parameters()}]
    with pytest.raises(ValueError, match="fisher must be the same in all parameter groups"):
        torchium.NaturalGradient(groups)


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("update_freq", [1, 3])
@pytest.mark.parametrize("how", ["deepcopy", "state_dict"])
def test_copies_and_checkpoints_go_on_alike(how, update_freq, fisher, device):
    model, _ = model_and_batch("tied_embedding", device=device)
    optimizer = torchium.NaturalGradient(
        model, damping=0.1, fisher=fisher, update_freq=update_freq, solver="gram"
    )
    train(optimizer, model, "tied_embedding", 2)
    if how == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    else:
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        twin = copy.deepcopy(model)
        other = torchium.NaturalGradient(twin)
        other.load_state_dict(torch.load(saved))
        assert other.param_groups[0]["fisher"] == fisher
    for each, its in ((model, optimizer), (twin, other)):
        train(its, each, "tied_embedding", 4, first=3)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_empirical_matrix_takes_no_curvature():
    model = nn.Linear(4, 3)
    optimizer = torchium.NaturalGradient(model)
    with pytest.raises(RuntimeError, match="needs fisher='mc' or 'ggn', got 'empirical'"):
        optimizer.update_curvature(model(torch.ones(2, 4)), "mse")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no_tensor": ({"outputs": [1.0]}, "outputs must be of type Tensor, got list"),
    "no_graph": ({"outputs": torch.ones(2, 3)}, "do not require gradients"),
    "loss": ({"loss": "nll"}, "loss must be one of 'cross_entropy', 'mse', 'bce', got 'nll'"),
    "samples": ({"samples": 0}, "samples must be an integer of at least 1, got 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    arguments, message = WRONG[case]
    model = nn.Linear(4, 3)
    optimizer = torchium.NaturalGradient(model, fisher="mc")
    outputs = model(torch.ones(2, 4))
    with pytest.raises(ValueError, match=message):
        optimizer.update_curvature(**{"outputs": outputs, "loss": "cross_entropy", **arguments})
    outputs.sum().backward()
    with pytest.raises(RuntimeError, match="was not called"):  # nothing was recorded
        optimizer.step()
