"""Processes that share the steps of NaturalGradient do what one does with all samples."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torchium
from captured_layers import MODELS, loss_fn
from group_tools import assert_same, assert_same_on_all_ranks, in_one_process
from natural_gradient_tools import (
    SOLVERS,
    Dense,
    alone,
    assert_moved_alike,
    average_gradients,
    batches_of,
    flat,
    model_and_batch,
    natural_gradient,
    own,
    sizes_of,
    step,
    trained,
)
from ranks import case, device
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

NAMES = sorted(MODELS.keys() - {"two_tables"})


def follow_dense(
    name: str, solver: str, sizes: list[int], steps: int = 2, change: Any = None, **options: Any
) -> None:
    model, _ = model_and_batch(name)
    start, reference = flat(model), Dense(model, **options)
    optimizer = natural_gradient(model, **SOLVERS[solver], **options)
    for seed in range(steps):
        batches = batches_of(name, sizes, seed)
        step(optimizer, model, batches[own()], change)
        reference.step(batches, change)
    try:
        reference.assert_moved_alike(model, start, 1e-6)
    except AssertionError as error:
        raise AssertionError(f"{name}, {solver}, {sizes}") from error
    report = optimizer.report()
    assert report["samples"] == report["rows"] == sum(sizes)
    assert (report["iterations"] > 0) == (report["solver"] == "cg")


@case(3)
def all_layers_follow_the_dense_solve(ranks: int) -> None:
    for name in NAMES:
        follow_dense(name, "gram_by_layers" if name == "convolutions" else "gram", sizes_of(ranks))
    for solver in SOLVERS:
        follow_dense("tied_embedding", solver, sizes_of(ranks))


@case(3)
def ranks_know_the_batches_of_each_step(ranks: int) -> None:
    """Sizes change, and a copy on one rank does not know those of the last step."""
    model, _ = model_and_batch("tied_embedding")
    start, reference = flat(model), Dense(model)
    optimizer = natural_gradient(model, solver="gram")
    for seed, sizes in enumerate(([3, 2, 4, 1], [3, 4, 2, 1], [3, 4, 2, 1], [3, 2, 4, 1])):
        if seed == 2 and own() == 1:
            model, optimizer = copy.deepcopy((model, optimizer))
        batches = batches_of("tied_embedding", sizes[:ranks], seed)
        step(optimizer, model, batches[own()])
        reference.step(batches)
    reference.assert_moved_alike(model, start, 1e-6)


@case(3)
def changed_gradients_follow_the_dense_solve(ranks: int) -> None:
    def clip_and_decay(params: list[Tensor]) -> None:
        for p in params:
            p.grad.mul_(0.3).add_(p.detach(), alpha=0.1)

    for solver in ("gram", "explicit", "cg"):
        follow_dense("mlp", solver, sizes_of(ranks), 3, clip_and_decay, momentum=0.0)


@case(3)
def options_follow_the_dense_solve(ranks: int) -> None:
    for solver in ("gram", "explicit", "nystrom"):
        for options in (
            {"update_freq": 3, "momentum": 0.9},
            {"max_norm": 0.1, "maximize": True},
        ):
            follow_dense("mlp", solver, sizes_of(ranks), 4, **options)


@case(3)
def fewer_layers_than_ranks(ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False).to(device(), torch.float64)
    one = copy.deepcopy(model)
    start = flat(model)
    x = torch.randn(2 * ranks, 4, dtype=torch.float64, device=device())
    y = torch.arange(2 * ranks, device=device()) % 3
    for each, group, samples in (
        (model, None, slice(2 * own(), 2 * own() + 2)),
        (one, alone(), slice(None)),
    ):
        optimizer = natural_gradient(each, group, solver="gram")
        loss_fn(each(x[samples]), y[samples]).backward()
        if group is None:
            average_gradients(each)
        optimizer.step()
    assert_moved_alike(model, one, start, 1e-9)


@case(2, 3)
def equal_batches_are_one_batch(ranks: int) -> None:
    sizes = sizes_of(ranks, equal=True)
    for name in ("convolutions", "shared_everywhere", "embedding"):
        model, _ = model_and_batch(name)
        one = copy.deepcopy(model)
        start = flat(model)
        optimizer = natural_gradient(model, update_freq=2)
        expected = natural_gradient(one, alone(), update_freq=2)
        for seed in range(4):
            batches = batches_of(name, sizes, seed)
            step(optimizer, model, batches[own()])
            expected.zero_grad()
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            loss_fn(one(x), y).backward()
            expected.step()
        assert_moved_alike(model, one, start, 1e-9)


@case(3)
def micro_batches_and_scaled_losses(ranks: int) -> None:
    model, _ = model_and_batch("sequence")
    start, reference = flat(model), Dense(model, update_freq=2)
    optimizer = natural_gradient(model, update_freq=2)
    scaler = GradScaler(device().type, init_scale=2.0**10, growth_interval=1)
    optimizer.grad_scaler = scaler
    for seed in range(3):
        batches = batches_of("sequence", [2, 4, 2, 6][:ranks], seed)
        optimizer.zero_grad()
        x, y = batches[own()]
        for half, target in zip(x.chunk(2), y.chunk(2), strict=True):
            scaler.scale(loss_fn(model(half), target) / 2).backward()
        average_gradients(model)
        scaler.step(optimizer)
        scaler.update()
        reference.step(batches)
    reference.assert_moved_alike(model, start, 1e-9)


def curvature_of_all_ranks(
    name: str, sizes: list[int], draws: list[int], **options: Any
) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model that the ranks have trained, one that this rank has trained alone, and the start.

    Alone it takes the batches of the ranks as micro-batches, and their mean gradient.
    """
    model, _ = model_and_batch(name)
    one = copy.deepcopy(model)
    start = flat(model)
    optimizer = natural_gradient(model, **options)
    expected = natural_gradient(one, alone(), **options)
    for seed in range(2):
        batches = batches_of(name, sizes, seed)
        for each, each_optimizer, members in (
            (model, optimizer, [own()]),
            (one, expected, range(len(sizes))),
        ):
            each_optimizer.zero_grad()
            for rank in members:
                x, y = batches[rank]
                outputs = each(x)
                generator = torch.Generator(device()).manual_seed(10 * seed + rank)
                each_optimizer.update_curvature(
                    outputs, "cross_entropy", samples=draws[rank], generator=generator
                )
                loss_fn(outputs, y).backward()
        average_gradients(model)
        for p, q in zip(trained(one), trained(model), strict=True):
            assert q.grad is not None
            p.grad = q.grad.clone()
        expected.step()
        optimizer.step()
        for key in ("samples", "rows"):
            assert optimizer.report()[key] == expected.report()[key]
    return model, one, start


@case(2, 3)
def curvatures_of_the_loss(ranks: int) -> None:
    for solver in ("gram", "cg"):
        for fisher, draws in (("ggn", [1] * 4), ("mc", [1] * 4), ("mc", [1, 3, 2, 1])):
            model, one, start = curvature_of_all_ranks(
                "embedding", sizes_of(ranks), draws, fisher=fisher, **SOLVERS[solver]
            )
            assert_moved_alike(model, one, start, 1e-6)


@case(3)
def kept_curvatures(ranks: int) -> None:
    model, one, start = curvature_of_all_ranks(
        "mlp", sizes_of(ranks), [1, 2, 1, 3], fisher="mc", update_freq=2
    )
    assert_moved_alike(model, one, start, 1e-9)


def rows_and_residuals(model: nn.Module, batch: Tensor) -> tuple[list[Tensor], Tensor]:
    def residual(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, x[None]).square().sum() - 1

    params = {name: p.detach() for name, p in model.named_parameters()}
    rows, residuals = torch.func.vmap(torch.func.grad_and_value(residual), (None, 0))(params, batch)
    return list(rows.values()), residuals


@case(2, 3)
def given_jacobians(ranks: int) -> None:
    sizes = sizes_of(ranks)
    for solver in ("gram", "gram_by_layers", "explicit", "cg"):
        model, _ = model_and_batch("mlp")
        one = copy.deepcopy(model)
        start = flat(model)
        optimizer = natural_gradient([*model.parameters()], **SOLVERS[solver])
        expected = natural_gradient([*one.parameters()], alone(), **SOLVERS[solver])
        for seed in range(3):
            batches = [x for x, _ in batches_of("mlp", sizes, seed)]
            optimizer.update_jacobian(*rows_and_residuals(model, batches[own()]))
            assert_same_on_all_ranks([p.grad for p in trained(model)])
            expected.update_jacobian(*rows_and_residuals(one, torch.cat(batches)))
            for p, q in zip(trained(model), trained(one), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
            optimizer.step()
            expected.step()
        assert_moved_alike(model, one, start, 1e-6)
        assert optimizer.report()["rows"] == sum(sizes)


@case(3)
def adaptive_damping(ranks: int) -> None:
    sizes = sizes_of(ranks, equal=True)
    model, _ = model_and_batch("mlp")
    one = copy.deepcopy(model)
    options = {"momentum": 0.0, "adaptive_damping": True, "lr": 0.05, "damping": 1.0}
    optimizer = natural_gradient(model, **options)
    expected = natural_gradient(one, alone(), **options)
    for seed in range(6):
        batches = batches_of("mlp", sizes, seed)
        ratios = []
        for each, each_optimizer, batch in (
            (model, optimizer, batches[own()]),
            (one, expected, tuple(torch.cat(parts) for parts in zip(*batches, strict=True))),
        ):
            each_optimizer.zero_grad()
            before = loss_fn(each(batch[0]), batch[1])
            before.backward()
            if each is model:
                average_gradients(model)
            each_optimizer.step()
            after = loss_fn(each(batch[0]), batch[1])
            ratios.append(each_optimizer.update_damping(before, after))
        torch.testing.assert_close(*ratios)
        dampings = [o.param_groups[0]["damping"] for o in (optimizer, expected)]
        assert dampings[0] == dampings[1]
    assert dampings[0] != 1.0
    assert_same_on_all_ranks(trained(model))


@case(3)
def data_parallel_training(ranks: int) -> None:
    data = torch.randn(16, 4 * ranks, 10, generator=torch.Generator().manual_seed(1)).to(device())
    losses = []
    for group in (None, alone()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 3)).to(device())
        model = DistributedDataParallel(net) if group is None else net
        optimizer = natural_gradient(model, group, lr=0.5, damping=1.0, momentum=0.5, update_freq=2)
        for batch in data:
            x = batch[4 * own() : 4 * own() + 4] if group is None else batch
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :3]).backward()
            optimizer.step()
        losses.append(F.mse_loss(net(data[0]), data[0, :, :3]).item())
        if group is None:
            assert_same_on_all_ranks(trained(net))
    assert losses[1] < 0.2  # of 1.3 at the start
    assert abs(losses[0] - losses[1]) < 1e-2 * losses[1]


@case(3)
def half_precision_and_mixed_dtypes(ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3).bfloat16()).to(device())
    x = torch.randn(2 * ranks, 6).to(device())[2 * own() : 2 * own() + 2]
    for solver in ("gram", "explicit", "cg"):
        optimizer = natural_gradient(model, lr=0.1, **{**SOLVERS[solver], "eps": 1e-6})
        for _ in range(2):
            optimizer.zero_grad()
            model[2](model[1](model[0](x)).bfloat16()).float().square().mean().backward()
            average_gradients(model)
            optimizer.step()
        assert_same_on_all_ranks(trained(model))
        assert all(p.isfinite().all() for p in model.parameters())


@case(3)
def sequences_of_different_lengths(ranks: int) -> None:
    """The positions of a layer differ between ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 4), nn.LayerNorm(4)).to(
        device(), torch.float64
    )
    one = copy.deepcopy(model)
    start = flat(model)
    tokens = [torch.randint(9, (2, 3 + rank)).to(device()) for rank in range(ranks)]
    optimizer, expected = natural_gradient(model), natural_gradient(one, alone())

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).cumsum(2).square().mean()

    loss(model, tokens[own()]).backward()
    average_gradients(model)
    optimizer.step()
    for x in tokens:
        (loss(one, x) / ranks).backward()
    expected.step()
    assert_moved_alike(model, one, start, 1e-9)
    assert dist.get_world_size() == ranks


@case(2)
def a_group_of_one_changes_no_bit(ranks: int) -> None:
    results = []
    for group in (None, alone()):
        model, _ = model_and_batch("convolutions", dtype=torch.float32)
        optimizer = torchium.NaturalGradient(model, update_freq=2, process_group=group)
        with in_one_process():
            for seed in range(4):
                x, y = model_and_batch("convolutions", dtype=torch.float32, seed=seed)[1]
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
        state = optimizer.state_dict()["state"]
        tensors = {f"{i}.{k}": v for i, s in state.items() for k, v in s.items()}
        results.append({**tensors, **model.state_dict()})
    assert_same(results[1], results[0])
