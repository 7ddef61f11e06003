"""Replicas and shards of Shampoo whose parameters, options and gradients change; on a CPU and on GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from group_tools import world
from ranks import case
from shampoo_tools import assert_agree, parameters, set_gradients, shampoo, train, values
from sharded_shampoo_cases import (
    full_gradients,
    fully_sharded,
    hybrid_sharded,
    line,
    loss_of,
    network,
    one_process,
    shards,
)
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel


@case(3)
def late_and_missing_gradients(ranks: int) -> None:
    results = []
    for group in (None, world()):
        params = parameters()
        params[0].requires_grad_(False)
        optimizer = shampoo(params, group, betas=(0.9, 0.99))
        for step in range(8):
            set_gradients(params, step)
            params[0].grad = None
            if step < 3:
                params[1].grad = None
            if step % 2:
                params[3].grad = params[6].grad = None
            if step == 6:
                params[0].requires_grad_(True)
                params[0].grad = torch.ones_like(params[0])
            optimizer.step()
        results.append(values(optimizer, params))
    assert_agree(results[1], results[0])


@case(2, 3)
def groups_and_options_change(ranks: int) -> None:
    results = []
    for group in (None, world()):
        params = parameters()
        optimizer = shampoo([{"params": params[:4]}, {"params": params[4:7], "lr": 0.1}], group)
        train(optimizer, params, range(2))
        optimizer.add_param_group({"params": params[7:], "grafting": "adam"})
        train(optimizer, params, range(2, 4))
        optimizer.param_groups[0].update(momentum=0.9, betas=(0.9, 0.9), update_freq=2)
        optimizer.param_groups[1].update(lr=0.02, weight_decay=0.1, grafting="rmsprop")
        train(optimizer, params, range(4, 7))
        optimizer.update_preconditioners()
        train(optimizer, params, range(7, 9))
        optimizer.param_groups[1].update(grafting="adagrad")
        train(optimizer, params, range(9, 11))
        results.append(values(optimizer, params))
    assert_agree(results[1], results[0])


@case(2)
def accumulation_with_no_sync(ranks: int) -> None:
    """Under DistributedDataParallel."""
    net, alone_net = network(), network()
    model = DistributedDataParallel(net)
    optimizer, alone = shampoo(net.parameters(), world()), shampoo(alone_net.parameters())
    for step in range(3):
        for half in range(2):
            with model.no_sync() if half == 0 else nullcontext():
                loss_of(model, 2 * step + half, dist.get_rank()).backward()
        for p, q in zip(alone_net.parameters(), net.parameters(), strict=True):
            p.grad = q.grad.clone()
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    actual = values(optimizer, [*net.parameters()])
    assert_agree(actual, values(alone, [*alone_net.parameters()]))


@case(4)
def frozen_parameters_and_new_groups(ranks: int) -> None:
    mesh = line(ranks)
    results = []
    for is_sharded in (True, False):
        params: list[Any] = parameters()
        if is_sharded:
            params = shards(params, mesh, [Shard(0)])
        params[0].requires_grad_(False)
        optimizer = shampoo(params[:5], dist.group.WORLD if is_sharded else None)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": params[5:], "lr": 0.02})
            if step == 4:
                params[0].requires_grad_(True)
            set_gradients(params, step)
            if step < 4:
                params[0].grad = None
            if step % 2:
                params[3].grad = None
            optimizer.step()
        results.append(values(optimizer, params))
    assert_agree(*results)


@case(4)
def accumulation_without_reduction(ranks: int) -> None:
    model = fully_sharded(ranks)
    whole = one_process(model)
    optimizer, alone = shampoo(model.parameters()), shampoo(whole)
    for step in range(3):
        for half in range(2):
            model.set_requires_gradient_sync(half == 1)
            loss_of(model, 2 * step + half, dist.get_rank()).backward()
        for p, grad in zip(whole, full_gradients(model), strict=True):
            p.grad = grad
        optimizer.step()
        alone.step()
        optimizer.zero_grad()
    assert_agree(values(optimizer, [*model.parameters()]), values(alone, whole))


@case(4, gpus=4)
def hybrid_training(ranks: int) -> None:
    """Replicas of shards."""
    model = hybrid_sharded(ranks)
    whole = one_process(model)
    optimizer, alone = shampoo(model.parameters()), shampoo(whole)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        for p, grad in zip(whole, full_gradients(model), strict=True):
            p.grad = grad
        optimizer.step()
        alone.step()
    assert_agree(values(optimizer, [*model.parameters()]), values(alone, whole))
