"""Directions that travel in stages: whatever the buckets, the steps of Shampoo are those of one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from group_tools import (
    assert_same,
    is_last,
    message_of,
    replaced_operator,
    whole_state,
    world,
)
from ranks import case
from shampoo_tools import (
    OPTIONS,
    assert_copies_go_on,
    parameters,
    set_gradients,
    shampoo,
    train,
    values,
)
from sharded_shampoo_cases import line, shards
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

# A rank has many blocks of one shape, of several parameters, and some without matrices.
SHAPES = [(64, 64), (5,), (64, 64), (48, 80), (33, 17), (), (64, 16), (3, 4, 20), (0, 3)]
BUCKETS = [1, 60000]  # two stages of matrices, or one


def trained(group: Any, steps: int, shapes: Any = SHAPES, **options: Any) -> dict[str, Any]:
    params = parameters(shapes=shapes)
    optimizer = shampoo(params, group, **options)
    train(optimizer, params, range(steps))
    return values(optimizer, params)


@case(2, 3)
def parameters_of_many_blocks(ranks: int) -> None:
    """Parameters and their whole state, which several plans of one rank keep."""
    for name in ("all_buffers", "penalty"):
        expected = trained(None, 3, **OPTIONS[name])
        for bucket_bytes in BUCKETS:
            actual = trained(world(), 3, bucket_bytes=bucket_bytes, **OPTIONS[name])
            assert_same(actual, expected)


@case(2)
def gradients_are_free_after_a_step(ranks: int) -> None:
    """Also those that the step reads where they are."""
    params = parameters(shapes=SHAPES)
    optimizer = shampoo(params, world(), **OPTIONS["all_buffers"])
    for step in range(3):
        set_gradients(params, step)
        storages = [StorageWeakRef(p.grad.untyped_storage()) for p in params]
        optimizer.step()
        optimizer.zero_grad()
        assert all(storage.expired() for storage in storages)


@case(3)
def stages_without_blocks(ranks: int) -> None:
    """Of some ranks, or of all."""
    for shapes in ([(0, 3)], [(0,), ()], [(16, 16)], [(0, 3), (16, 16)], [(64, 64), (4,), (4, 4)]):
        expected = trained(None, 2, shapes)
        for bucket_bytes in (1, 2**63 - 1):
            assert_same(trained(world(), 2, shapes, bucket_bytes=bucket_bytes), expected)


@case(2, 3)
def blocks_that_move_to_other_stages(ranks: int) -> None:
    """Their state follows: parameters join late, in new groups and after they were frozen."""
    for bucket_bytes in BUCKETS:
        results = []
        for group in (None, world()):
            params = parameters(shapes=[*SHAPES, (64, 64), (40, 24), (7,)])
            params[3].requires_grad_(False)
            optimizer = shampoo(params[2:4], group, betas=(0.9, 0.99), bucket_bytes=bucket_bytes)
            for step in range(8):
                if step == 2:
                    optimizer.add_param_group({"params": params[9:], "block_size": 8})
                if step == 4:
                    late = params[:2] + params[4:9]
                    optimizer.add_param_group({"params": late, "momentum": 0.9})
                if step == 6:
                    params[3].requires_grad_(True)
                    optimizer.update_preconditioners()
                set_gradients(params, step)
                params[3].grad = params[3].grad if params[3].requires_grad else None
                params[9].grad = params[9].grad if step != 5 else None
                optimizer.step()
            results.append(values(optimizer, params))
        assert_same(results[1], results[0])


@case(3)
def another_bucket_size_after_a_checkpoint(ranks: int) -> None:
    options = OPTIONS["all_buffers"]
    expected = trained(None, 5, **options)
    for before, after in ((1, 2**25), (2**25, 1), (1, 40000)):
        params = parameters(shapes=SHAPES)
        optimizer = shampoo(params, world(), bucket_bytes=before, **options)
        train(optimizer, params, range(3))
        saved = copy.deepcopy(whole_state(optimizer))
        params = [nn.Parameter(p.detach().clone()) for p in params]
        resumed = shampoo(params, world(), bucket_bytes=after, **options)
        resumed.load_state_dict(saved)
        train(resumed, params, range(3, 5))
        assert_same(values(resumed, params), expected)


@case(2)
def copies_of_all_stages(ranks: int) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = shampoo(params, world(), bucket_bytes=1, **OPTIONS["all_buffers"])
    train(optimizer, params, range(2))
    assert_copies_go_on(optimizer, params, range(2, 4))


@case(2)
def dtypes_beside_each_other(ranks: int) -> None:
    for bucket_bytes in BUCKETS:
        results = []
        for group in (None, world()):
            params = [
                p
                for dtype in (torch.float32, torch.float64, torch.bfloat16)
                for p in parameters(dtype, SHAPES[:5])
            ]
            optimizer = shampoo(params, group, bucket_bytes=bucket_bytes, betas=(0.9, 0.99))
            train(optimizer, params, range(4))
            results.append(values(optimizer, params))
        for key, expected in results[0].items():
            is_double = expected.dtype == torch.float64
            rtol, atol = (1e-9, 1e-11) if is_double else (0.0, 0.0)
            torch.testing.assert_close(results[1][key], expected, rtol=rtol, atol=atol)


@case(3)
def shards_beside_replicas(ranks: int) -> None:
    """Directions for all ranks travel in stages, those for single ranks after them."""
    mesh = line(ranks)
    options = OPTIONS["all_buffers"]
    expected = trained(None, 4, **options)
    for bucket_bytes in BUCKETS:
        params: list[Any] = [
            *shards(parameters(shapes=SHAPES)[:4], mesh, [Shard(0)]),
            *shards(parameters(shapes=SHAPES)[4:], mesh, [Replicate()]),
        ]
        params[2:3] = shards(parameters(shapes=SHAPES)[2:3], mesh, [Replicate()])
        optimizer = shampoo(params, world(), bucket_bytes=bucket_bytes, **options)
        train(optimizer, params, range(4))
        assert_same(values(optimizer, params), expected)


@case(2)
def a_failed_root_names_its_parameter(ranks: int) -> None:
    for failing in range(5):
        params = parameters(shapes=[(4,)] + [(64, 64)] * 5)
        groups = [{"params": params[:3]}, {"params": params[3:]}]
        optimizer = shampoo(groups, world(), max_root_failures=1, update_freq=1, bucket_bytes=1)
        train(optimizer, params, range(1))
        for key in ("statistics.0", "statistics.1"):
            optimizer.state[params[1 + failing]][key].fill_(float("inf"))
        train(optimizer, params, range(1, 2))
        set_gradients(params, 2)
        kind, message = message_of(optimizer.step)
        group, index = divmod(1 + failing, 3)
        assert kind == "RuntimeError"
        assert f"parameter {index} of group {group} (" in message, message


@case(2)
def an_error_in_the_statistics_is_one_on_all(ranks: int) -> None:
    for products in (0, 1):  # two are taken, for the statistics of rows and of columns
        params = parameters(shapes=[(16, 16)] * 6)
        optimizer = shampoo(params, world(), bucket_bytes=1)
        train(optimizer, params, range(2))
        before = [p.detach().clone() for p in params]
        left = iter(range(products))

        def add_product(
            tensor: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1, left: Any = left
        ) -> Any:
            if next(left, None) is None:
                raise MemoryError("none left for statistics")
            return tensor.mul_(beta).add_(a @ b, alpha=alpha)

        set_gradients(params, 2)
        with replaced_operator("baddbmm_", add_product) if is_last() else nullcontext():
            kind, message = message_of(optimizer.step)
        assert kind == ("MemoryError" if is_last() else "RuntimeError"), message
        text = f"rank {ranks - 1} of the process group raised an error during its work"
        assert ("none left for statistics" if is_last() else text) in message, message
        assert all(map(torch.equal, params, before))
        assert not is_last() or next(left, None) is None
