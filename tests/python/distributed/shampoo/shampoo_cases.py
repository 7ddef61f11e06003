"""Processes that share the steps of Shampoo do what one does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from group_tools import assert_same, assert_same_on_all_ranks, whole_state, world
from ranks import case
from shampoo_tools import OPTIONS, parameters, set_gradients, shampoo, train, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@case(2, 3)
def equals_one_process(ranks: int) -> None:
    kinds = ((torch.float32, "eigh"), (torch.float32, "newton"), (torch.bfloat16, "eigh"))
    for i, (name, options) in enumerate(OPTIONS.items()):
        # Two ranks differ from three in how many blocks they own: all kinds in turn.
        for dtype, method in kinds if ranks > 2 else (kinds[i % 3],):
            results = []
            for group in (None, world()):
                params = parameters(dtype)
                optimizer = shampoo(params, group, root_method=method, **options)
                train(optimizer, params, range(5))
                results.append(values(optimizer, params))
            try:
                assert_same(results[1], results[0])
            except AssertionError as error:
                raise AssertionError(f"{name}, {dtype}, {method}") from error


@case(3)
def a_block_is_computed_alike_in_any_batch(ranks: int) -> None:
    shapes = [(16, 16), (40, 24), (50, 7), (7, 33), (9,)]
    for dtype in (torch.float32, torch.float64):
        for method in ("eigh", "newton"):
            together = parameters(dtype, shapes * 3)
            train(shampoo(together, root_method=method), together, range(4))
            for i in range(len(shapes)):
                alone = parameters(dtype, shapes * 3)
                optimizer = shampoo(alone[i : i + 1], root_method=method)
                for step in range(4):
                    set_gradients(alone, step)
                    optimizer.step()
                assert torch.equal(alone[i], together[i]), (dtype, method, shapes[i])


@case(3)
def float64_stays_float64(ranks: int) -> None:
    for options in OPTIONS.values():
        results = []
        for group in (None, world()):
            params = parameters(torch.float64)
            optimizer = shampoo(params, group, **options)
            train(optimizer, params, range(6))
            results.append(values(optimizer, params))
        for key, expected in results[0].items():
            torch.testing.assert_close(results[1][key], expected, rtol=1e-9, atol=1e-11)


@case(3)
def each_rank_keeps_its_share(ranks: int) -> None:
    params = parameters(shapes=[(64, 64), (64, 48), (64,), (32, 32)])
    optimizer = shampoo(params, world(), betas=(0.9, 0.99))
    train(optimizer, params, range(2))
    own = sum(t.numel() for p in params for t in optimizer.state[p].values())
    whole = sum(t.numel() for s in whole_state(optimizer)["state"].values() for t in s.values())
    assert own < 1.2 * whole / ranks
    counts = torch.tensor([optimizer.state[params[0]]["statistics.0"].shape[0]])
    dist.all_reduce(counts)
    assert counts.item() == 16
    assert whole_state(optimizer)["state"][0]["statistics.0"].shape == (16, 16, 16)


@case(3)
def buckets_do_not_matter(ranks: int) -> None:
    results = []
    for bucket_bytes in (1, 700, 2**25):
        params = parameters()
        optimizer = shampoo(params, world(), bucket_bytes=bucket_bytes)
        train(optimizer, params, range(3))
        results.append(values(optimizer, params))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@case(3)
def updates_travel_in_16_bits(ranks: int) -> None:
    for dtype, error in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        exact, rounded = parameters(), parameters()
        a, b = shampoo(exact, world()), shampoo(rounded, world(), comm_dtype=dtype)
        starts = [p.detach().clone() for p in exact]
        train(a, exact, range(1))
        train(b, rounded, range(1))
        assert_same_on_all_ranks(rounded)
        for start, x, y in zip(starts, exact, rounded, strict=True):
            moved = (x - start).abs()
            assert torch.all((x - y).abs() <= error * moved + 1e-6)
        assert any(not torch.equal(x, y) for x, y in zip(exact, rounded, strict=True))


@case(3)
def options_change_while_a_gradient_is_missing(ranks: int) -> None:
    results = []
    for group in (None, world()):
        params = parameters()
        optimizer = shampoo(params, group)
        train(optimizer, params, range(1))
        optimizer.param_groups[0]["momentum"] = 0.9
        for step in range(1, 5):
            set_gradients(params, step)
            if step < 3:
                params[0].grad = None
            optimizer.step()
        results.append(values(optimizer, params))
    assert_same(results[1], results[0])


@case(3)
def other_memory_layouts(ranks: int) -> None:
    results = []
    for group in (None, world()):
        layer = nn.Conv2d(6, 20, 3).to(memory_format=torch.channels_last)
        weight = torch.Generator().manual_seed(0)
        layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=weight))
        layer.bias.data.zero_()
        assert not layer.weight.is_contiguous()
        optimizer = shampoo(layer.parameters(), group, betas=(0.9, 0.9), weight_decay=0.1, eps=0.1)
        train(optimizer, [*layer.parameters()], range(4))
        results.append(values(optimizer, [*layer.parameters()]))
    for key, expected in results[0].items():
        torch.testing.assert_close(results[1][key], expected, rtol=1e-4, atol=1e-5)
        assert results[1][key].stride() == expected.stride()


@case(3)
def data_parallel_training(ranks: int) -> None:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(40, 12 * ranks, 10, generator=generator)
    losses = {}
    for group in (None, world()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 3))
        model = net if group is None else DistributedDataParallel(net)
        optimizer = shampoo(net.parameters(), group, grafting="adam", betas=(0.9, 0.99), lr=0.01)
        for step in range(20):
            optimizer.zero_grad()
            for half in range(2):
                batch = data[2 * step + half]
                inputs = batch if group is None else batch[12 * rank : 12 * rank + 12]
                loss = (model(inputs) - inputs[:, :3].square()).square().mean() / 2
                if group is not None and half == 0:
                    with model.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.step()
        losses[group is None] = (net(data[0]) - data[0, :, :3].square()).square().mean().item()
    assert_same_on_all_ranks([*net.parameters()])
    assert abs(losses[True] - losses[False]) < 1e-3 * losses[True]


@case(3)
def closures_and_tensors_as_learning_rates(ranks: int) -> None:
    results = []
    for group in (None, world()):
        params = parameters()
        optimizer = shampoo(params, group, lr=torch.tensor(0.05))

        def closure(params: list[nn.Parameter] = params) -> float:
            set_gradients(params, 3)
            return 1.5

        assert optimizer.step(closure) == 1.5
        results.append(values(optimizer, params))
    assert_same(results[1], results[0])


@case(3)
def as_a_replacement_of_adamw(ranks: int) -> None:
    import torchium

    results = []
    for group in (None, world()):
        params = parameters()
        adamw = torch.optim.AdamW(params, lr=1e-2)
        optimizer = torchium.Shampoo.from_adamw(
            adamw, block_size=16, root_method="eigh", process_group=group
        )
        assert "process_group" not in optimizer.param_groups[0]
        train(optimizer, params, range(4))
        results.append(values(optimizer, params))
    assert_same(results[1], results[0])
