"""NaturalGradient: the dense float64 solve, on typical models."""

from __future__ import annotations

import copy

import pytest
import torch
import torchium
from captured_layers import MODELS, TwoTables, loss_fn, model_and_batch
from combinations import in_turn
from optimizer_cases import assert_same, snapshot, values
from reference import ReferenceNaturalGradient
from reference.per_sample import per_sample_gradients
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DAMPINGS = [1e-7, 1e-5, 1e-3, 1e-1, 1.0]
SOLVERS = ["gram", "explicit", "cg"]
Batch = tuple[Tensor, Tensor]


class Reference:
    """The dense solve for a model: its own copy, float64, on the CPU."""

    def __init__(self, model: nn.Module, **options) -> None:
        self.model = copy.deepcopy(model).cpu().double()
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.names = [n for n, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = ReferenceNaturalGradient(params, **options)

    def step(self, batch: Batch, change=None) -> None:
        """One step on the mean loss; `change` may modify the gradients."""
        x, y = (t.cpu() for t in batch)
        rows = per_sample_gradients(self.model, loss_fn, x, y)
        for p, name in zip(self.optimizer.params, self.names, strict=True):
            p.grad = rows[name].mean(0)
        if change is not None:
            change(self.optimizer.params)
        self.optimizer.step([rows[name] for name in self.names])


def step(optimizer, model: nn.Module, batch: Batch, change=None) -> None:
    optimizer.zero_grad()
    loss_fn(model(batch[0]), batch[1]).backward()
    if change is not None:
        change([p for p in model.parameters() if p.requires_grad])
    optimizer.step()


def assert_moved_alike(model, reference, start, tolerance):
    """Compare the changes of all parameters together."""
    moved, exact = (
        torch.cat([(p - s.to(p)).flatten().cpu().double() for p, s in zip(x, start, strict=True)])
        for x in (values(model), values(reference.model))
    )
    assert (moved - exact).norm() <= tolerance * exact.norm()
    assert exact.norm() > 0


def batches(name: str, count: int, device="cpu", samples=5) -> list[Batch]:
    return [model_and_batch(name, samples, device=device, seed=i)[1] for i in range(count)]


@pytest.mark.parametrize(
    ("name", "solver", "damping"),
    in_turn(sorted(MODELS.keys() - {"two_tables"}), SOLVERS, DAMPINGS),
)
def test_direction_is_the_dense_solve(name, solver, damping, device):
    model, batch = model_and_batch(name, device=device)
    start, reference = values(model), Reference(model, lr=1.0, damping=damping)
    optimizer = torchium.NaturalGradient(model, lr=1.0, damping=damping, solver=solver, eps=1e-13)
    step(optimizer, model, batch)
    reference.step(batch)
    assert_moved_alike(model, reference, start, 1e-6)
    report = optimizer.report()
    assert report["solver"] == solver
    assert report["samples"] == 5
    assert (report["iterations"] > 0) == (solver == "cg")
    assert 0 <= report["relative_residual"] < 1e-9


@pytest.mark.parametrize("name", ["mlp", "convolutions", "tied_embedding"])
@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_float32_direction_is_near_the_dense_solve(name, damping, device):
    model, batch = model_and_batch(name, dtype=torch.float32, device=device)
    start, reference = values(model), Reference(model, lr=1.0, damping=damping)
    step(torchium.NaturalGradient(model, lr=1.0, damping=damping), model, batch)
    x = batch[0].double() if batch[0].is_floating_point() else batch[0]
    reference.step((x, batch[1]))
    assert_moved_alike(model, reference, start, 2e-3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_convolution_with_many_positions_in_float32(solver, device):
    """Its rows are kept within a step on a Hopper GPU, and multiplied three times with momentum."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    channels = 16 if device.type == "cuda" else 4
    model = nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1), nn.Tanh(), nn.AvgPool2d(3), nn.Flatten(),
        nn.Linear(4 * channels, 3),
    ).to(device)  # fmt: skip
    options = {"lr": 1.0, "damping": 1e-2, "momentum": 0.9}
    start, reference = values(model), Reference(model, **options)
    optimizer = torchium.NaturalGradient(model, solver=solver, eps=1e-6, **options)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, channels, 6, 6, generator=generator).to(device)
        y = torch.randint(3, (5,), generator=generator).to(device)
        step(optimizer, model, (x, y))
        reference.step((x.double(), y))
    assert_moved_alike(model, reference, start, 2e-3)


def halve(params):
    for p in params:
        p.grad.mul_(0.5)


def decay(params):
    for p in params:
        p.grad.add_(p.detach(), alpha=0.1)


def clip(params):
    nn.utils.clip_grad_norm_(params, 0.05)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, None),
        ({}, halve),
        ({}, decay),
        ({}, clip),
        ({"momentum": 0.9}, None),
        ({"momentum": 0.5, "max_norm": 0.3}, decay),
        ({"maximize": True}, None),
        ({"update_freq": 3}, None),
        ({"update_freq": 2, "momentum": 0.9, "damping": 1.0}, clip),
    ],
)
def test_a_run_follows_the_dense_solves(solver, options, change, device):
    options = {"lr": 0.1, "damping": 0.1, **options}
    model, _ = model_and_batch("mlp", device=device)
    start, reference = values(model), Reference(model, **options)
    optimizer = torchium.NaturalGradient(model.parameters(), solver=solver, eps=1e-13, **options)
    for batch in batches("mlp", 7, device):
        step(optimizer, model, batch, change)
        reference.step(batch, change)
    assert_moved_alike(model, reference, start, 1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_groups_have_their_own_options(solver):
    model, _ = model_and_batch("mlp")
    start = values(model)
    options = [
        {"lr": 0.3, "damping": 0.01, "momentum": 0.0, "maximize": False},
        {"lr": 0.1, "damping": 1.0, "momentum": 0.5, "maximize": True},
    ]
    groups = [list(model[:2].parameters()), list(model[2:].parameters())]
    of_params = [o for o, params in zip(options, groups, strict=True) for _ in params]
    reference = Reference(model, **{key: [o[key] for o in of_params] for key in options[0]})
    optimizer = torchium.NaturalGradient(
        [{"params": p, **o} for p, o in zip(groups, options, strict=True)], solver=solver, eps=1e-13
    )
    for batch in batches("mlp", 4):
        step(optimizer, model, batch)
        reference.step(batch)
    assert_moved_alike(model, reference, start, 1e-8)


def test_auto_takes_the_smaller_space():
    """Of order m, if its matrix and factor, 16 m^2 bytes, fit into the workspace."""
    small = nn.Linear(2, 1)
    optimizer = torchium.NaturalGradient(small)
    assert optimizer.report() == {}
    for samples, order, solver in ((2, 2, "gram"), (3, 3, "gram"), (4, 3, "explicit")):
        for workspace in (16 * order**2, 16 * order**2 - 1):
            optimizer.param_groups[0]["max_workspace_bytes"] = workspace
            optimizer.zero_grad()
            small(torch.randn(samples, 2)).mean().backward()
            optimizer.step()
            fits = workspace == 16 * order**2
            assert optimizer.report()["solver"] == (solver if fits else "cg")
            assert optimizer.report()["samples"] == samples


@pytest.mark.parametrize("workspace", [1, 16 * 900 * 2, 2**28])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "embedding", "shared_everywhere"])
def test_explicit_takes_rows_in_chunks(name, workspace, device):
    model, (x, y) = model_and_batch(name, samples=7, device=device)
    reference = Reference(model, lr=0.1, damping=0.1)
    start = values(model)
    optimizer = torchium.NaturalGradient(
        model, lr=0.1, damping=0.1, solver="explicit", max_workspace_bytes=workspace
    )
    for _ in range(2):
        optimizer.zero_grad()
        for i in (0, 3):  # two micro-batches
            part = slice(i, i + 3 + i // 3)
            (loss_fn(model(x[part]), y[part]) * len(y[part]) / 7).backward()
        optimizer.step()
        reference.step((x, y))
    assert_moved_alike(model, reference, start, 1e-8)


@pytest.mark.parametrize("name", ["mlp", "convolutions", "tied_embedding"])
def test_micro_batches_equal_one_batch(name, device):
    model, (x, y) = model_and_batch(name, samples=6, device=device)
    whole = copy.deepcopy(model)
    step(torchium.NaturalGradient(whole), whole, (x, y))
    optimizer = torchium.NaturalGradient(model)
    for i in range(0, 6, 2):
        (loss_fn(model(x[i : i + 2]), y[i : i + 2]) / 3).backward()
    optimizer.step()
    torch.testing.assert_close(values(model), values(whole), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("update_freq", [1, 2])
def test_a_loss_scale_cancels(unscale, update_freq, device):
    """A power of two is exact."""
    results = []
    for enabled in (False, True):
        scaler = GradScaler(device.type, init_scale=2.0**12, enabled=enabled)
        model, _ = model_and_batch("mlp", dtype=torch.float32, device=device)
        optimizer = torchium.NaturalGradient(model, update_freq=update_freq, grad_scaler=scaler)
        for x, y in batches("mlp", 4, device):
            optimizer.zero_grad()
            scaler.scale(loss_fn(model(x.float()), y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append(values(model))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_kept_batch_keeps_the_scale_of_its_loss(device):
    """The scaler changes its tensor in place before the batch is used again."""
    results = []
    for enabled in (False, True):
        scaler = GradScaler(device.type, init_scale=2.0**8, growth_interval=1, enabled=enabled)
        model, _ = model_and_batch("mlp", dtype=torch.float32, device=device)
        optimizer = torchium.NaturalGradient(model, update_freq=3, grad_scaler=scaler)
        for x, y in batches("mlp", 3, device):
            optimizer.zero_grad()
            scaler.scale(loss_fn(model(x.float()), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (2.0**11 if enabled else 1.0)
        states = optimizer.state.values()
        kept = [v for state in states for k, v in state.items() if k.startswith("output_gradients")]
        assert len(kept) == 3
        results.append([*values(model), *kept])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_parameter_that_the_batch_does_not_use_stays():
    model, batch = model_and_batch("two_tables")
    optimizer = torchium.NaturalGradient(
        [p for n, p in model.named_parameters() if n != "unused"], lr=1.0
    )
    step(optimizer, model, batch)
    used = set(batch[0].flatten().tolist())
    start = model_and_batch("two_tables")[0]
    for row in range(50):
        assert torch.equal(model.table.weight[row], start.table.weight[row]) == (row not in used)


def test_in_between_layers_are_not_captured_and_the_batch_is_not_the_users():
    """The kept batch must not change when the user writes to the input."""
    results = []
    for overwrite in (False, True):
        model, (x, y) = model_and_batch("mlp")
        optimizer = torchium.NaturalGradient(model, update_freq=3, lr=0.1)
        for seed in range(6):
            fresh, y = batches("mlp", seed + 1)[seed]
            x = x.copy_(fresh) if overwrite else fresh
            step(optimizer, model, (x, y))
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            kept = optimizer._capture.calls()
            assert bool(kept) == (seed % 3 == 2)  # the next step is a refresh
        results.append(values(model))
    assert_same(results[1], results[0])


def test_changed_damping_between_refreshes_is_used():
    model, _ = model_and_batch("mlp")
    start = values(model)
    reference = Reference(model, lr=0.1, damping=0.1, update_freq=4)
    optimizer = torchium.NaturalGradient(model, lr=0.1, damping=0.1, update_freq=4, solver="gram")
    for i, batch in enumerate(batches("mlp", 4)):
        if i == 2:
            optimizer.param_groups[0]["damping"] = 1.0
            reference.optimizer.damping = torch.ones_like(reference.optimizer.damping)
        step(optimizer, model, batch)
        reference.step(batch)
    assert_moved_alike(model, reference, start, 1e-8)


# ---- unsupported uses


def refused_at_once(layer: nn.Module, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(ValueError, match=message):
        torchium.NaturalGradient(model)


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def patched() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x
    return layer


UNSUPPORTED = {
    "lstm": (lambda: nn.LSTM(4, 4), r"layer '1' \(LSTM\), which is of an unsupported type"),
    "prelu": (nn.PReLU, r"\(PReLU\), which is of an unsupported type"),
    "batch_norm": (
        lambda: nn.BatchNorm1d(4).eval(),
        r"\(BatchNorm1d\), which is of an unsupported",
    ),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, kdim=3),
        r"\(MultiheadAttention\), which has kdim",
    ),
    "sparse": (lambda: nn.Embedding(4, 4, sparse=True), r"\(Embedding\), which has sparse=True"),
    "max_norm": (lambda: nn.Embedding(4, 4, max_norm=1.0), r"which has max_norm=1.0"),
    "frequency": (
        lambda: nn.Embedding(4, 4, scale_grad_by_freq=True),
        r"which has scale_grad_by_freq=True",
    ),
    "own_forward": (lambda: OwnForward(4, 4), r"\(OwnForward\), which has a forward of its own"),
    "patched": (patched, r"layer '1' \(Linear\), which has a forward of its own"),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        r"which has a weight computed by WeightNorm",
    ),
    "weight_norm_by_a_hook": (
        lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
        r"layer '1' \(Linear\), which has a weight computed by WeightNorm",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_layers_that_are_not_supported_are_refused_by_name(kind):
    make, message = UNSUPPORTED[kind]
    refused_at_once(make(), message)


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_frozen_layers_may_be_of_any_kind(kind):
    layer = UNSUPPORTED[kind][0]().requires_grad_(False)
    torchium.NaturalGradient(nn.Sequential(nn.Linear(4, 4), layer))


def assert_refused(optimizer, message: str) -> None:
    before = snapshot(optimizer)
    gradients = [p.grad.clone() for p in snapshot_params(optimizer)]
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    assert_same([p.grad for p in snapshot_params(optimizer)], gradients)


def snapshot_params(optimizer) -> list[Tensor]:
    return [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def test_parameters_of_an_unsupported_layer_are_refused_when_it_has_run():
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU())
    optimizer = torchium.NaturalGradient(model.parameters())
    model(torch.randn(3, 4)).mean().backward()
    assert_refused(optimizer, r"\(PReLU\), which is of an unsupported type")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("form", [lambda m: m, nn.Module.parameters], ids=["model", "parameters"])
def test_batch_norm_in_training_is_refused_by_name(affine, form):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    optimizer = torchium.NaturalGradient(form(model))
    x = torch.randn(3, 4)
    model(x).mean().backward()
    assert_refused(
        optimizer, r"layer '1' \(BatchNorm1d\) normalised with the statistics of the batch"
    )
    # In evaluation mode, or if no gradient has come from it, it does no harm.
    model(x)
    with torch.no_grad():
        model(x)
    model[1].eval()
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()


class FunctionalNorm(nn.Module):
    """Normalises by a function call after its last layer, or before it."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 4), nn.Linear(4, 4), last
        self.norm = F.batch_norm

    def forward(self, x: Tensor) -> Tensor:
        def normalised(x: Tensor) -> Tensor:
            return self.norm(x, torch.zeros(4), torch.ones(4), training=self.training)

        return normalised(self.b(self.a(x))) if self.last else self.b(normalised(self.a(x)))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_batch_norm_called_as_a_function_is_refused_by_name(last, checkpointed):
    model = FunctionalNorm(last)
    optimizer = torchium.NaturalGradient(model)
    x, y = torch.randn(5, 4), torch.randint(4, (5,))
    before = values(model)
    output = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
    loss_fn(output, y).backward()
    with pytest.raises(ValueError, match=r"batch_norm\(training=True\)"):
        optimizer.step()
    assert_same(values(model), before)
    model.eval()
    step(optimizer, model, (x, y))
    assert optimizer.report()["samples"] == 5


def test_instance_norm_called_as_a_function_mixes_no_samples():
    """Internally it is batch_norm of one sample with many channels."""
    model = FunctionalNorm(last=False)
    model.norm = lambda x, *args, **options: F.instance_norm(x.view(-1, 2, 2)).flatten(1)
    optimizer = torchium.NaturalGradient(model)
    step(optimizer, model, (torch.randn(5, 4), torch.randint(4, (5,))))
    assert optimizer.report()["samples"] == 5


def test_batch_norm_without_running_statistics_is_refused_in_any_mode():
    norm = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 4), norm).eval()
    optimizer = torchium.NaturalGradient(model)
    model(torch.randn(3, 4)).square().mean().backward()
    assert_refused(optimizer, r"BatchNorm1d\) normalised")


class TiedOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.middle = nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.middle(self.table(x)), self.table.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_that_is_used_outside_of_its_layer_is_refused(dtype):
    model = TiedOutside().to(dtype)
    optimizer = torchium.NaturalGradient(model)
    F.cross_entropy(model(torch.tensor([1, 2, 3])), torch.tensor([0, 1, 5])).backward()
    assert_refused(optimizer, r"gradient of parameter 'table.weight'.*does not come from its layer")
    optimizer.zero_grad()
    F.cross_entropy(model(torch.tensor([1, 2, 3])), torch.tensor([0, 1, 5])).backward()
    assert_refused(optimizer, r"'table.weight'")


def test_a_penalty_on_gradients_is_refused():
    """Its gradient passes through the layers in other ways."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torchium.NaturalGradient(model)
    x = torch.randn(5, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().mean().backward()
    assert_refused(optimizer, "does not come from its layer|captured no backward pass")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mlp", "sequence", "convolutions", "tied_embedding"])
def test_rounding_is_not_taken_for_a_use_outside(name, dtype):
    for seed in range(5):
        model, batch = model_and_batch(name, samples=16, dtype=dtype, seed=seed)
        optimizer = torchium.NaturalGradient(model, lr=1e-3)
        step(optimizer, model, batch)
        optimizer.check_errors()


def test_hooks_of_the_user_on_a_parameter_are_no_use_outside():
    """For example a gradient mask; the resulting gradient is preconditioned."""
    model = nn.Linear(4, 3)
    mask = (torch.rand(3, 4) > 0.5).float()
    model.weight.register_hook(lambda gradient: gradient * mask)
    optimizer = torchium.NaturalGradient(model)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()


def test_gradients_set_by_hand_are_refused():
    model = nn.Linear(4, 3)
    optimizer = torchium.NaturalGradient(model)
    model.weight.grad = torch.ones(3, 4)
    assert_refused(optimizer, "captured no backward pass")
    model(torch.randn(5, 4))[:, 0].sum().backward(inputs=[model.weight])
    model.bias.grad = torch.ones(3)
    assert_refused(optimizer, r"gradient of parameter 'bias'")


def test_a_second_step_on_the_same_gradients_is_refused():
    model, batch = model_and_batch("mlp")
    optimizer = torchium.NaturalGradient(model)
    step(optimizer, model, batch)
    assert_refused(optimizer, "captured no backward pass")


class Positions(nn.Module):
    def __init__(self, length: int, expand: bool = False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(length, 4)
        self.out, self.expand = nn.Linear(4, 2), expand

    def forward(self, x):
        positions = torch.arange(x.shape[1])
        if self.expand:
            positions = positions.expand_as(x)
        return self.out(self.tokens(x) + self.positions(positions)).mean(1)


@pytest.mark.parametrize("batch", [2, 5])
def test_positions_that_are_no_samples_are_refused_by_name(batch):
    """Also if there happen to be as many of them."""
    model = Positions(5)
    optimizer = torchium.NaturalGradient(model)
    x = torch.randint(9, (batch, 5))
    model(x).square().mean().backward()
    assert_refused(optimizer, r"'positions.weight'.*expand positions to")

    expanded = Positions(5, expand=True)
    optimizer = torchium.NaturalGradient(expanded)
    expanded(x).square().mean().backward()
    optimizer.step()


def test_a_first_step_of_zero_gradients_makes_the_state():
    """As torch.distributed.checkpoint does before it loads."""
    model, _ = model_and_batch("mlp")
    optimizer = torchium.NaturalGradient(model, momentum=0.5)
    start = values(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_same(values(model), start)
    assert all(s["step"] == 1 and not s["momentum_buffer"].any() for s in optimizer.state.values())


def test_unused_parameters_without_gradient_do_not_matter():
    model, batch = model_and_batch("two_tables")
    assert isinstance(model, TwoTables)
    refusal = (
        r"a layer of type TwoTables, which is of an unsupported type.*\(unused\) by requires_grad_"
    )
    with pytest.raises(ValueError, match=refusal):
        torchium.NaturalGradient(model)
    optimizer = torchium.NaturalGradient(model.parameters())
    step(optimizer, model, batch)
    assert not optimizer.state.get(model.unused)


@pytest.mark.parametrize("refilled", ["between micro-batches", "before the step"])
def test_a_buffer_that_is_refilled_too_early_is_refused(refilled):
    model, (x, y) = model_and_batch("mlp")
    optimizer = torchium.NaturalGradient(model)
    before = values(model)
    buffer = x.clone()
    for _ in range(2):
        if refilled == "between micro-batches":
            buffer.copy_(x)
        (loss_fn(model(buffer), y) / 2).backward()
    if refilled == "before the step":
        buffer.copy_(x)
    with pytest.raises(ValueError, match=r"Linear layer was changed in place .* until step\(\)"):
        optimizer.step()
    assert_same(values(model), before)
    optimizer.zero_grad()
    loss_fn(model(buffer), y).backward()
    optimizer.step()


def test_parameters_of_several_dtypes_under_autocast(device):
    """The half-precision ones have the rounding of the others, whose products autocast computes in 16 bits."""
    dtype = torch.bfloat16 if device == "cpu" else torch.float16
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(device)
    model[1].to(dtype)
    optimizer = torchium.NaturalGradient(model, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for seed in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(device)
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, dtype):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, old)
