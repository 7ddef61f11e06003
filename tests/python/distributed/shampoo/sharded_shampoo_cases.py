"""DTensor parameters: ranks that hold parts of them step as one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from group_tools import assert_same, is_last, message_of
from ranks import case, device
from shampoo_tools import OPTIONS, parameters, set_gradients, shampoo, train, values
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard


def line(ranks: int) -> DeviceMesh:
    return init_device_mesh(device().type, (ranks,), mesh_dim_names=("ranks",))


def square() -> DeviceMesh:
    return init_device_mesh(device().type, (2, 2), mesh_dim_names=("outer", "inner"))


def sharded(tensor: Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    placements = [
        Replicate() if not p.is_replicate() and p.dim >= tensor.dim() else p for p in placements
    ]
    if isinstance(placements[0], _StridedShard) and tensor.shape[0] % mesh.size() != 0:
        placements = [Shard(0), Shard(0)]  # torch cuts a tensor into even strided shards alone
    return distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None)


def shards(params: list[nn.Parameter], mesh: DeviceMesh, placements: list[Any]) -> list[Any]:
    return [nn.Parameter(sharded(p, mesh, placements)) for p in params]


def layouts(ranks: int) -> dict[str, tuple[DeviceMesh, list[Any]]]:
    result: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "rows": (line(ranks), [Shard(0)]),
        "columns": (line(ranks), [Shard(1)]),
        "replicas": (line(ranks), [Replicate()]),
    }
    if ranks == 4:
        result |= {
            "replicas of rows": (square(), [Replicate(), Shard(0)]),
            "rows of columns": (square(), [Shard(0), Shard(1)]),
            "rows of rows": (square(), [Shard(0), Shard(0)]),
            "strided rows": (square(), [_StridedShard(0, split_factor=2), Shard(0)]),
            "part of the ranks": (square()["inner"], [Shard(0)]),
        }
    return result


def trained(params: list[Any], group: Any, **options: Any) -> dict[str, Tensor]:
    optimizer = shampoo(params, group, **options)
    train(optimizer, params, range(5))
    return values(optimizer, params)


@case(3, 4)
def shards_equal_one_process(ranks: int) -> None:
    alone: dict[tuple[str, torch.dtype], dict[str, Tensor]] = {}
    for layout, (mesh, placements) in layouts(ranks).items():
        if ranks == 4 and layout in layouts(3):  # 3 ranks cut tensors less evenly
            continue
        for name, options in OPTIONS.items():
            few = layout not in ("rows", "strided rows")
            if few and name not in ("all_buffers", "diagonal", "flattened"):
                continue
            both_dtypes = layout == "rows" and name in ("all_buffers", "penalty")
            for dtype in (torch.float32, torch.bfloat16) if both_dtypes else (torch.float32,):
                if (name, dtype) not in alone:
                    alone[name, dtype] = trained(parameters(dtype), None, **options)
                params = shards(parameters(dtype), mesh, placements)
                actual = trained(params, dist.group.WORLD, **options)
                try:
                    assert_same(actual, alone[name, dtype])
                except AssertionError as error:
                    raise AssertionError(f"{layout}, {name}, {dtype}") from error


@case(2, 4)
def vectors_stay_in_shards_that_are_multiples_of_block_size(ranks: int) -> None:
    shapes = [(32 * ranks,), (16 * ranks - 1,)]
    params = shards(parameters(shapes=shapes), line(ranks), [Shard(0)])
    optimizer: Any = shampoo(params, dist.group.WORLD, grafting="sgd")
    train(optimizer, params, range(3))
    assert_same(values(optimizer, params), alone(shapes, grafting="sgd"))
    for p in params:
        assert optimizer._plans.owners(optimizer._shards.of(p)) == list(range(ranks))


@case(2)
def columns_of_elements_are_blocks_of_one_element(ranks: int) -> None:
    options = {"block_size": 1, "max_preconditioned_dim": 2, "grafting": "sgd"}
    params = shards(parameters(shapes=[(6, 5)]), line(ranks), [Shard(1)])
    optimizer = shampoo(params, dist.group.WORLD, **options)
    train(optimizer, params, range(3))
    assert_same(values(optimizer, params), alone([(6, 5)], **options))


@case(2)
def gradients_of_other_placements_are_brought_to_those_of_the_parameters(ranks: int) -> None:
    """In turn with those of the parameters, also after a local tensor was replaced in place."""
    shapes = [(20, 6), (7, 5)]
    params = shards(parameters(shapes=shapes), line(ranks), [Shard(0)])
    optimizer = shampoo(params, dist.group.WORLD)
    for step, placement in enumerate((Shard(0), Replicate(), Shard(1), Shard(0))):
        set_gradients(params, step)
        for p in params:
            p.grad = p.grad.redistribute(p.device_mesh, [placement])
        if step == 2:
            params[0]._local_tensor = params[0]._local_tensor.clone()
            params[1]._local_tensor.data = params[1]._local_tensor.data.clone()
        optimizer.step()
        assert all(list(p.grad.placements) == [Shard(0)] for p in params)
    train(optimizer, params, range(4, 5))
    same = parameters(shapes=shapes)
    reference = shampoo(same)
    train(reference, same, range(5))
    assert_same(values(optimizer, params), values(reference, same))


def alone(shapes: list[tuple[int, ...]], **options: Any) -> dict[str, Tensor]:
    """What one process computes."""
    params = parameters(shapes=shapes)
    optimizer = shampoo(params, **options)
    train(optimizer, params, range(3))
    return values(optimizer, params)


def one_process(model: nn.Module) -> list[nn.Parameter]:
    return [nn.Parameter(p.full_tensor()) for p in model.parameters()]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 34), nn.Tanh(), nn.Linear(34, 3)
    ).to(device())


def fully_sharded(ranks: int) -> nn.Module:
    model = network()
    fully_shard(model[2], mesh=line(ranks))
    return fully_shard(model, mesh=line(ranks))


def hybrid_sharded(ranks: int) -> nn.Module:
    return fully_shard(network(), mesh=square())


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    plan = {"2": ColwiseParallel(), "4": RowwiseParallel()}
    model = parallelize_module(network(), mesh, plan)
    for name, p in model[0].named_parameters():
        setattr(model[0], name, nn.Parameter(sharded(p, mesh, [Replicate()])))
    model[0].register_forward_pre_hook(lambda _, x: distribute_tensor(x[0], mesh, [Replicate()]))
    model[1].register_forward_hook(lambda *x: x[2].to_local())
    return model


def fully_sharded_tensor_parallel(ranks: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        network(), mesh["tp"], {"2": ColwiseParallel(), "4": RowwiseParallel()}
    )
    return fully_shard(model, mesh=mesh["dp"])


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "fully_shard": fully_sharded,
    "hybrid": hybrid_sharded,
    "tensor parallel": lambda ranks: tensor_parallel(square()["inner"]),
    "fully_shard and tensor parallel": fully_sharded_tensor_parallel,
}


def loss_of(model: nn.Module, step: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + seed)
    inputs = torch.randn(8, 10, generator=generator).to(device())
    return (model(inputs) - inputs[:, :3].square()).square().mean()


def full_gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.full_tensor().clone() for p in model.parameters()]


@case(4)
def models_train_as_in_one_process(ranks: int) -> None:
    for name, make in MODELS.items():
        model = make(ranks)
        whole = one_process(model)
        # The ranks are those of the mesh, without a process_group.
        optimizer = shampoo(model.parameters(), grafting="adam", betas=(0.9, 0.99), lr=0.01)
        alone = shampoo(whole, grafting="adam", betas=(0.9, 0.99), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            seed = 0 if "tensor" in name else dist.get_rank()
            loss_of(model, step, seed).backward()
            for p, grad in zip(whole, full_gradients(model), strict=True):
                p.grad = grad
            optimizer.step()
            alone.step()
        try:
            assert_same(values(optimizer, [*model.parameters()]), values(alone, whole))
        except AssertionError as error:
            raise AssertionError(name) from error


@case(4)
def buckets_and_rounding_keep_replicas_equal(ranks: int) -> None:
    results = []
    for options in ({"bucket_bytes": 1}, {"bucket_bytes": 2**25}, {"comm_dtype": torch.bfloat16}):
        params = shards(parameters(), square(), [Replicate(), Shard(0)])
        optimizer = shampoo(params, **options)
        train(optimizer, params, range(3))
        results.append(values(optimizer, params))
        for p in params:
            local = p.to_local().detach()
            other = local.clone()
            dist.broadcast(other, dist.get_rank() % 2, group=square().get_group("outer"))
            assert torch.equal(local, other)
    assert_same(results[0], results[1])
    assert any(not torch.equal(results[0][key], results[2][key]) for key in results[0])


@case(4)
def blocks_stay_in_their_shards(ranks: int) -> None:
    """State of aligned blocks lies where the parameter does; others are shared out."""
    params = shards(parameters(shapes=[(64, 32), (50, 16)]), line(ranks), [Shard(0)])
    optimizer = shampoo(params)
    train(optimizer, params, range(1))
    assert optimizer.state[params[0]]["statistics.0"].shape == (2, 16, 16)
    rows = optimizer.state[params[1]]["statistics.0"].shape[0]
    assert rows <= 1
    own = sum(t.numel() for p in params for t in optimizer.state[p].values())
    whole = sum(t.numel() for s in optimizer.state_dict()["state"].values() for t in s.values())
    assert own < 1.3 * whole / ranks


@case(4)
def failures_are_those_of_all_ranks(ranks: int) -> None:
    params = shards(parameters(), line(ranks), [Shard(0)])
    optimizer = shampoo([(f"p{i}", p) for i, p in enumerate(params)])
    train(optimizer, params, range(2))
    before = values(optimizer, params)
    last = is_last()

    set_gradients(params, 2)
    if last:
        params[0].grad.to_local().fill_(float("nan"))
    optimizer.step()
    assert_same(values(optimizer, params), before)

    set_gradients(params, 2)
    if last:
        params[3].grad = None
    kind, message = message_of(optimizer.step)
    assert kind == "RuntimeError"
    assert "'p3' of group 0 (shape [33, 17]) has a gradient on ranks 0, 1 and 2 of" in message

    set_gradients(params, 2)
    if last:
        optimizer.param_groups[0]["eps"] = -1.0
    kind, message = message_of(optimizer.step)
    assert ("eps must be" if last else f"rank {ranks - 1} of the process group raised") in message
    optimizer.param_groups[0]["eps"] = 1e-4
    assert_same(values(optimizer, params), before)

    for _ in range(2):  # the first skip was above
        set_gradients(params, 2)
        if dist.get_rank() == 0:
            params[0].grad.to_local()[0, 0] = float("inf")
        kind, message = message_of(optimizer.step)
    assert "3 steps in a row" in message
    assert "parameter 'p0' of group 0 (shape [40, 24])" in message


@case(4)
def a_scaler_unscales_shards(ranks: int) -> None:
    results = []
    for scale in (1.0, 1024.0):
        params = shards(parameters(), line(ranks), [Shard(0)])
        optimizer = shampoo(params)
        for step in range(3):
            set_gradients(params, step)
            for p in params:
                p.grad *= scale
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.found_inf = torch.tensor(float(step == 1 and dist.get_rank() == 2))
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        results.append(values(optimizer, params))
    assert results[0]["step of 0"] == 2
    assert_same(*results)


@case(4)
def what_is_refused(ranks: int) -> None:
    import torchium

    mesh = line(ranks)
    plain = nn.Parameter(torch.randn(4, 4))
    mixed = [*shards(parameters(shapes=[(8, 8)]), mesh, [Shard(0)]), plain]
    optimizer = shampoo([("a", mixed[0]), ("b", plain)])
    set_gradients(mixed, 0)
    kind, message = message_of(optimizer.step)
    assert kind == "ValueError"
    assert "parameter 'b' of group 0 (shape [4, 4]) is a plain tensor among DTensor" in message
    shared = shampoo(mixed, dist.group.WORLD)
    shared.step()
    for make in (torchium.Adagrad, torchium.AdaHessian):
        kind, message = message_of(lambda make=make: make(mixed[:1]))
        assert kind == "ValueError"
        assert "is a DTensor, which is not supported" in message
    from torch.distributed.tensor import Partial

    partial = nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh, [Partial()]))
    kind, message = message_of(lambda: shampoo([partial]))
    assert kind == "ValueError"
    assert "must be replicated or sharded" in message
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    other = shampoo(mixed[:1], halves[dist.get_rank() // 2])
    kind, message = message_of(other.step)
    assert kind == "ValueError"
    assert "no regular part of the ranks" in message


@case(4)
def reports_roots_and_copies(ranks: int) -> None:
    params: list[Any] = shards(parameters(), line(ranks), [Shard(0)])
    whole = parameters()
    optimizer, alone = shampoo(params), shampoo(whole)
    assert optimizer.memory_report().total == alone.memory_report().total
    assert optimizer.report() == alone.report()
    train(optimizer, params, range(2))
    train(alone, whole, range(2))
    assert optimizer.memory_report().total.state.total < alone.memory_report().total.state.total
    for each in (optimizer, alone):
        each.update_preconditioners()
    train(optimizer, params, range(2, 4))
    train(alone, whole, range(2, 4))
    assert_same(values(optimizer, params), values(alone, whole))
    other_params, other = copy.deepcopy((params, optimizer))
    for each, own in ((optimizer, params), (other, other_params)):
        train(each, own, range(4, 6))
    assert_same(values(other, other_params), values(optimizer, params))


@case(4)
def parameters_that_are_swapped(ranks: int) -> None:
    """Accelerate puts other tensors into the groups after the optimizer was made."""
    mesh = line(ranks)
    whole = parameters()
    optimizer = shampoo(whole)
    params = shards(whole, mesh, [Shard(0)])
    for group in optimizer.param_groups:
        group["params"] = params
    train(optimizer, params, range(3))
    expected = parameters()
    alone = shampoo(expected)
    train(alone, expected, range(3))
    assert_same(values(optimizer, params), values(alone, expected))
    # The memory of the shards moves.
    for p in params:
        p._local_tensor = p._local_tensor.clone()
    train(optimizer, params, range(3, 5))
    train(alone, expected, range(3, 5))
    assert_same(values(optimizer, params), values(alone, expected))
