"""Several GPUs share the steps of Shampoo, with NCCL: replicas and shards."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchium
from cuda_launches import kernels_of
from group_tools import assert_same_on_all_ranks
from ranks import case, device, listed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

SHAPES = [(300, 200), (128, 128), (200,), (), (64, 16, 3, 3), (1000, 30), (257, 129), (5000,)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"betas": (0.9, 0.99), "grafting": "adam", "momentum": 0.9},
    {"weight_decay": 0.1, "maximize": True, "preconditioner_1d": "full", "grafting": "sgd"},
    {"target_order": 1, "block_size": 512, "preconditioner_1d": "full", "grafting": "adam"},
    {"target_order": 0, "preconditioner_1d": "full", "betas": (0.9, 0.99)},
    {"max_preconditioned_dim": 250, "grafting": "rmsprop", "weight_decay": 0.1},
]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(device(), dtype))
        for shape in SHAPES
    ]


def train(optimizer: Any, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()


@case(2)
def equals_one_process(ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for options in OPTIONS:
            given = {"block_size": 128, "update_freq": 3, "eps": 1e-2, **options}
            alone, shared = parameters(dtype), parameters(dtype)
            one = torchium.Shampoo(alone, **given)
            two = torchium.Shampoo(
                shared, **given, process_group=dist.group.WORLD, bucket_bytes=2**16
            )
            for steps in (range(3), range(3, 12)):
                train(one, alone, steps)
                train(two, shared, steps)
                assert_same_on_all_ranks(shared)
                buffer = io.BytesIO()
                with two.consolidating():
                    torch.save(two.state_dict(), buffer)
                buffer.seek(0)
                two.load_state_dict(torch.load(buffer))
            two.check_errors()
            rtol = 1e-3 if dtype == torch.float32 else 2e-2
            for i, (p, q) in enumerate(zip(shared, alone, strict=True)):
                error = ((p - q).norm() / q.norm()).item()
                assert error < rtol, (dtype, options, i, error)


@case(2)
def gradients_of_any_scale_equal_one_process(ranks: int) -> None:
    """The agreement finds the largest magnitudes, from which the products choose their scales."""
    given = {"lr": 0.1, "block_size": 128, "update_freq": 2, "eps": 0.0, "relative_eps": 1e-2}
    for scales in ((1e-12,), (1e9,), (1e-3, 1e6)):
        alone, shared = parameters(torch.float32), parameters(torch.float32)
        one = torchium.Shampoo(alone, **given)
        two = torchium.Shampoo(shared, **given, process_group=dist.group.WORLD)
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            for p, q in zip(alone, shared, strict=True):
                values = torch.randn(p.shape, generator=generator).to(p)
                p.grad = q.grad = values * scales[step % len(scales)]
            one.step()
            two.step()
        two.check_errors()
        for i, (p, q) in enumerate(zip(shared, alone, strict=True)):
            assert (p - q).norm() <= 1e-3 * q.norm(), (scales, i)


def kernels_of_a_step(optimizer: Any, params: list[nn.Parameter], step: int) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train(optimizer, params, range(step, step + 1))
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


@case(2)
def directions_are_read_from_memory(ranks: int) -> None:
    """Not gathered by NCCL, where the devices have peer access and all have new memory at once."""
    rank = dist.get_rank()
    others = [other for other in range(ranks) if other != rank]
    has_access = all(torch.cuda.can_device_access_peer(rank, other) for other in others)
    for comm_dtype in (torch.float32, torch.bfloat16):
        params = parameters(torch.float32)
        given = {"block_size": 128, "bucket_bytes": 2**16, "comm_dtype": comm_dtype}
        optimizer = torchium.Shampoo(params, **given, process_group=dist.group.WORLD)
        for step, replaced_on, reads in ((0, [], True), (2, [1], False), (4, range(ranks), True)):
            if rank in replaced_on:
                params[0].data = params[0].data.clone()
            train(optimizer, params, range(step, step + 1))
            names = kernels_of_a_step(optimizer, params, step + 1)
            assert any("AllReduce" in name for name in names), names
            gathers = any("AllGather" in name for name in names)
            assert gathers != (reads and has_access), (step, names)
            assert_same_on_all_ranks(params)


@case(2)
def memory_reports_count_the_graphs_of_all_stages(ranks: int) -> None:
    params = parameters(torch.float32)
    given = {"block_size": 128, "update_freq": 5, "betas": (0.9, 0.99), "bucket_bytes": 2**16}
    optimizer = torchium.Shampoo(params, **given, graphs="always", process_group=dist.group.WORLD)
    train(optimizer, params, range(20))
    graphs = torch.tensor(optimizer._plans.graph_count(), device=device())
    assert (optimizer.memory_report().total.graphs > 0) == (graphs.item() > 0)
    dist.all_reduce(graphs)  # a rank may own no blocks of stages that graphs replay
    assert graphs.item() > 0


@case(2)
def ranks_fail_together(ranks: int) -> None:
    rank = dist.get_rank()
    params = parameters(torch.float32)
    optimizer = torchium.Shampoo(params, block_size=128, process_group=dist.group.WORLD)
    optimizer.param_groups[0]["eps"] = -1.0 if rank else 1e-4
    message = "eps must be" if rank else f"rank {ranks - 1} of the process group raised an error"
    with pytest.raises((ValueError, RuntimeError), match=message):
        train(optimizer, params, range(1))
    optimizer.param_groups[0]["eps"] = 1e-4
    train(optimizer, params, range(2))
    before = [p.detach().clone() for p in params]
    params[2].grad = None if rank else params[2].grad
    others = listed([*range(1, ranks)])
    with pytest.raises(RuntimeError, match=f"has a gradient on rank 0 .* none on {others};"):
        optimizer.step()
    for attempt in range(3):
        for p in params:
            p.grad = torch.full_like(p, float("nan") if rank else 1.0)
        if attempt < 2:
            optimizer.step()
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    train(optimizer, params, range(2, 4))
    assert_same_on_all_ranks(params)


@case(2)
def skipped_steps_keep_the_schedule_of_roots(ranks: int) -> None:
    """The plans of the blocks have launched a step before the host knows that it is skipped."""
    given = {"block_size": 128, "update_freq": 3, "eps": 1e-2, "betas": (0.9, 0.99)}
    results = []
    for on_device, group in ((torch.device("cpu"), None), (device(), dist.group.WORLD)):
        params = [nn.Parameter(p.detach().to(on_device)) for p in parameters(torch.float32)]
        optimizer = torchium.Shampoo(params, **given, process_group=group)
        for step in range(10):
            if step in (1, 4, 5):
                for p in params:
                    p.grad = torch.ones_like(p)
                params[4].grad.view(-1)[7] = float("inf")  # only the owner of its block sees it
                optimizer.step()
            train(optimizer, params, range(step, step + 1))
        optimizer.check_errors()
        assert all(state["step"].item() == 10 for state in optimizer.state.values())
        results.append([p.detach().cpu() for p in params])
    for i, (p, q) in enumerate(zip(*results, strict=True)):
        assert (p - q).norm() < 2e-3 * q.norm(), i


@case(2)
def data_parallel_training(ranks: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).cuda()
    model = DistributedDataParallel(net, device_ids=[dist.get_rank()])
    optimizer = torchium.Shampoo.from_adamw(net, lr=1e-2, process_group=dist.group.WORLD)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(40):
        inputs = torch.randn(32, 64, generator=generator).cuda()
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :10]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert_same_on_all_ranks([*net.parameters()])


def sharded(tensors: list[nn.Parameter], mesh: Any, placement: Any) -> list[nn.Parameter]:
    return [
        nn.Parameter(
            distribute_tensor(
                t.detach(), mesh, [placement if t.dim() > placement.dim else Replicate()]
            )
        )
        for t in tensors
    ]


@case(2)
def shards_equal_one_process(ranks: int) -> None:
    """Rows and columns, of sizes that the ranks do not divide and that the blocks do not."""
    mesh = init_device_mesh("cuda", (ranks,))
    for dtype, placement in ((torch.float32, Shard(0)), (torch.bfloat16, Shard(1))):
        for options in OPTIONS:
            given = {"block_size": 128, "update_freq": 3, "eps": 1e-2, **options}
            alone, shards = parameters(dtype), sharded(parameters(dtype), mesh, placement)
            one = torchium.Shampoo(alone, **given)
            two = torchium.Shampoo(shards, **given, bucket_bytes=2**16)
            for step in range(8):
                generator = torch.Generator().manual_seed(step)
                for p, shard in zip(alone, shards, strict=True):
                    p.grad = torch.randn(p.shape, generator=generator).to(p)
                    shard.grad = distribute_tensor(p.grad, mesh, shard.placements)
                one.step()
                two.step()
            two.check_errors()
            rtol = 1e-3 if dtype == torch.float32 else 2e-2
            for i, (p, q) in enumerate(zip(shards, alone, strict=True)):
                error = ((p.full_tensor() - q).norm() / q.norm()).item()
                assert error < rtol, (dtype, options, i, error)


@case(2)
def directions_that_stay_update_parameters_at_once(ranks: int) -> None:
    """Rows of whole blocks: from a bucket on, the results are those of directions that are applied later.

    Gradients are read where they are, though blocks are cut in columns.
    """
    mesh = init_device_mesh("cuda", (ranks,))
    rows = 64 * ranks
    whole_blocks = [(4 * rows, 200), (2 * rows, 64), (2 * rows,), (rows, 20, 3, 3)]
    cut_blocks = [(8, 20, 3, 3), (300,)]  # of which directions travel
    for dtype in (torch.float32, torch.bfloat16):
        for options in OPTIONS:
            given = {"decoupled_weight_decay": True, "weight_decay": 0.1, "lr": 0.02, **options}
            all_stay = options in OPTIONS[:2]
            shapes = whole_blocks + ([] if all_stay else cut_blocks)
            results = []
            for bucket_bytes in (1, 2**40):
                generator = torch.Generator().manual_seed(0)
                tensors = [
                    nn.Parameter(torch.randn(s, generator=generator).to(device(), dtype))
                    for s in shapes
                ]
                shards = sharded(tensors, mesh, Shard(0))
                two = torchium.Shampoo(
                    shards,
                    **{"block_size": 64, "update_freq": 3} | given,
                    bucket_bytes=bucket_bytes,
                )
                for step in range(12):  # of which graphs replay some
                    for shard in shards:
                        local = torch.randn(shard.to_local().shape, generator=generator)
                        if step == 8 and dist.get_rank() == 0:
                            local[-1] = float("inf")  # all skip the step
                        local = local.to(shard.to_local())
                        shard.grad = DTensor.from_local(local, mesh, shard.placements)
                    names = kernels_of(two.step)
                assert any("update_kernel" in name for name in names)
                later = any("move_kernel" in name for name in names)
                assert later or bucket_bytes == 1, options
                if all_stay:
                    assert later == (bucket_bytes > 1), options
                    gathers = any("gather_kernel" in n and "BlockEntry" in n for n in names)
                    assert gathers == (bucket_bytes > 1 or dtype != torch.float32), options
                results.append([p.to_local().detach().clone() for p in shards])
            for i, (p, q) in enumerate(zip(*results, strict=True)):
                assert torch.equal(p, q), (dtype, options, i, (p - q).norm() / q.norm())


@case(2)
def shards_of_three_dimensions_without_matrices_take_steps(ranks: int) -> None:
    """Of columns, each a block of a shape that the kernels do not know."""
    mesh = init_device_mesh("cuda", (ranks,))
    results = []
    for bucket_bytes in (1, 2**40):
        generator = torch.Generator(device()).manual_seed(0)
        whole = torch.randn(4, 64, 3, device=device(), generator=generator)
        (shard,) = sharded([nn.Parameter(whole.clone())], mesh, Shard(1))
        group = {"params": [shard], "preconditioned": False}
        optimizer = torchium.Shampoo([group], grafting="adam", bucket_bytes=bucket_bytes)
        for _ in range(3):
            grad = torch.randn(whole.shape, device=device(), generator=generator)
            shard.grad = distribute_tensor(grad, mesh, shard.placements)
            optimizer.step()
        optimizer.check_errors()
        results.append(shard.full_tensor())
    assert torch.equal(*results)
    assert not torch.equal(results[0], whole)


@case(2)
def one_number_of_gradients_that_are_read_where_they_are_skips_the_step(ranks: int) -> None:
    mesh = init_device_mesh("cuda", (ranks,))
    for columns in (200, 201):  # read four at a time, or one
        for place in ((0, 0), (63, 64), (64, 63), (-1, -1)):
            whole = torch.randn(128 * ranks, columns, device=device())
            (shard,) = sharded([nn.Parameter(whole)], mesh, Shard(0))
            local = shard.to_local().detach()
            grad = torch.ones_like(local)
            if dist.get_rank() == ranks - 1:
                grad[place] = torch.nan
            shard.grad = DTensor.from_local(grad, mesh, shard.placements)
            before = local.clone()
            optimizer = torchium.Shampoo([shard], block_size=64, bucket_bytes=1)
            optimizer.step()
            assert torch.equal(local, before), (columns, place)
            shard.grad = DTensor.from_local(torch.ones_like(local), mesh, shard.placements)
            optimizer.step()
            assert not torch.equal(local, before)


@case(2)
def whole_blocks_take_no_memory_beside_their_state(ranks: int) -> None:
    """Those that directions and gathered gradients would take."""
    mesh = init_device_mesh("cuda", (ranks,))
    taken = []
    for bucket_bytes in (1, 2**40):
        shards = sharded([nn.Parameter(torch.randn(2048, 1024, device=device()))], mesh, Shard(0))
        local = shards[0].to_local()
        shards[0].grad = DTensor.from_local(torch.randn_like(local), mesh, shards[0].placements)
        before = torch.cuda.memory_allocated()
        optimizer = torchium.Shampoo(
            shards, block_size=256, graphs=False, bucket_bytes=bucket_bytes
        )
        for _ in range(3):
            optimizer.step()
        optimizer.check_errors()
        taken.append(torch.cuda.memory_allocated() - before)
        del optimizer
    assert taken[1] - taken[0] > 1.8 * local.nbytes, taken


@case(2)
def fully_shard_training(ranks: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (ranks,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 255), nn.Tanh(), nn.Linear(255, 10)).cuda()
    fully_shard(net, mesh=mesh)
    optimizer = torchium.Shampoo.from_adamw(net, lr=1e-2)
    scaler = torch.amp.GradScaler("cuda")
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(40):
        inputs = torch.randn(32, 64, generator=generator).cuda()
        optimizer.zero_grad()
        loss = (net(inputs) - inputs[:, :10]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    optimizer.load_state_dict(optimizer.state_dict())
    net(inputs).square().mean().backward()
    optimizer.step()
    optimizer.check_errors()


class Captured:
    """Steps with gradients at fixed addresses, replayed from a graph after some that are launched."""

    def __init__(self, options: dict[str, Any], mesh: Any = None) -> None:
        params = parameters(torch.float32)
        self.params = params if mesh is None else sharded(params, mesh, Shard(0))
        self.optimizer = torchium.Shampoo(
            self.params,
            block_size=128,
            bucket_bytes=2**16,
            capturable=True,
            process_group=dist.group.WORLD if mesh is None else None,
            **options,
        )
        for p in self.params:
            p.grad = torch.zeros_like(p)
        self.graph: Any = None

    def capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.optimizer.step()

    def step(self, number: int, value: float | None = None) -> None:
        generator = torch.Generator().manual_seed(number)
        for p in self.params:
            grad = torch.randn(p.shape, generator=generator)
            grad = grad if value is None else torch.full_like(grad, value)
            local = p.grad.to_local() if isinstance(p, DTensor) else p.grad
            local.copy_(local_part(grad, p))
        if self.graph is not None:
            self.graph.replay()
            return
        torch.cuda.set_sync_debug_mode("default" if number == 0 else "error")
        self.optimizer.step()
        torch.cuda.set_sync_debug_mode("default")

    def values(self) -> list[torch.Tensor]:
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in self.params]


def local_part(values: torch.Tensor, p: Any) -> torch.Tensor:
    if not isinstance(p, DTensor):
        return values
    return distribute_tensor(values.to(device()), p.device_mesh, p.placements).to_local()


@case(2)
def captured_steps_equal_launched_ones(ranks: int) -> None:
    """With NCCL and the reads of other memory in the graph; neither waits for the device."""
    adam = {"betas": (0.9, 0.99), "grafting": "adam", "weight_decay": 0.1, "momentum": 0.9}
    mesh = init_device_mesh("cuda", (ranks,))
    for options in ({}, adam, {**adam, "decoupled_weight_decay": True}):
        for of_shards in (None, mesh):
            launched, captured = Captured(options, of_shards), Captured(options, of_shards)
            for number in range(10):
                if number == 3:
                    captured.capture()
                for each in (launched, captured):
                    each.step(number, float("nan") if number == 5 else None)
                if number in (2, 6):
                    launched.optimizer.update_preconditioners()
                    captured.optimizer.update_preconditioners()
            for each in (launched, captured):
                each.optimizer.check_errors()
            for p, q in zip(launched.values(), captured.values(), strict=True):
                assert torch.isfinite(p).all()
                assert torch.equal(p, q)
            for p, q in zip(launched.params, captured.params, strict=True):
                step = captured.optimizer.state[q]["step"]
                assert step == launched.optimizer.state[p]["step"] == 9
            if of_shards is None:
                assert_same_on_all_ranks(captured.params)


@case(2)
def captured_steps_report_their_skips_late(ranks: int) -> None:
    rank = dist.get_rank()
    captured = Captured({})
    for number in range(3):
        captured.step(number)
    captured.capture()
    before = [p.clone() for p in captured.values()]
    for number in range(3):
        captured.step(number, float("inf") if rank else None)
        if number < 2:
            captured.optimizer.check_errors()
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        captured.optimizer.check_errors()
    assert all(torch.equal(p, q) for p, q in zip(captured.values(), before, strict=True))
    captured.step(3)
    captured.optimizer.check_errors()
    assert not torch.equal(captured.values()[0], before[0])
    assert_same_on_all_ranks(captured.params)


@case(2)
def capturable_steps_raise_where_ranks_differ(ranks: int) -> None:
    rank = dist.get_rank()
    captured = Captured({})
    captured.step(0)
    with pytest.raises(RuntimeError, match="cannot be captured yet"):
        captured.capture()
    captured.graph = None
    captured.step(1)
    if rank:
        captured.optimizer.param_groups[0]["eps"] = 0.5
    before = [p.clone() for p in captured.values()]
    captured.step(2)
    assert all(torch.equal(p, q) for p, q in zip(captured.values(), before, strict=True))
    others, verb = listed([*range(1, ranks)]), "differs" if ranks == 2 else "differ"
    with pytest.raises(RuntimeError, match=f"{others} of the process group {verb} from rank 0"):
        captured.optimizer.check_errors()
    captured.optimizer.param_groups[0]["eps"] = 0.5
    captured.step(3)
    captured.optimizer.check_errors()
    assert not torch.equal(captured.values()[0], before[0])
    params = parameters(torch.float32)
    groups = [{"params": params[:3], "capturable": True}, {"params": params[3:]}]
    optimizer = torchium.Shampoo(groups, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="all parameter groups or in none; it is set in 1 of 2"):
        train(optimizer, params, range(1))
