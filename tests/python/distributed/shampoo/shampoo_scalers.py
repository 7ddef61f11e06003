"""torch.amp.GradScaler with the steps that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from group_tools import assert_same, is_last, world
from ranks import case, device
from shampoo_tools import assert_agree, shampoo, values
from sharded_shampoo_cases import line, loss_of, network
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS, OVERFLOW = 5, 2
GIVEN: dict[str, Any] = {"eps": 1e-2, "root_method": "newton", "betas": (0.9, 0.99)}


def same_scale_on_all_ranks(scaler: Any) -> float:
    scale = torch.tensor(scaler.get_scale(), device=device())
    scales = [torch.empty_like(scale) for _ in range(dist.get_world_size())]
    dist.all_gather(scales, scale)
    assert all(other == scale for other in scales)
    return scale.item()


def trained(
    model: nn.Module,
    optimizer: Any,
    overflow: Callable[[nn.Module, Tensor], Tensor],
    spoil: Callable[[nn.Module], None],
    is_scaled: bool,
) -> dict[str, Tensor]:
    """With a scaler one step overflows; without, that step is left out."""
    scaler = torch.amp.GradScaler(device().type, init_scale=2.0**10, enabled=is_scaled)
    params = [*model.parameters()]
    for step in range(STEPS):
        if step == OVERFLOW and not is_scaled:
            continue
        optimizer.zero_grad()
        before = values(optimizer, params) if step == OVERFLOW else {}
        loss = loss_of(model, step, dist.get_rank())
        scaler.scale(overflow(model, loss) if step == OVERFLOW else loss).backward()
        if step == OVERFLOW:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()
        if is_scaled:
            assert same_scale_on_all_ranks(scaler) == 2.0 ** (9 if step >= OVERFLOW else 10)
        if step == OVERFLOW:
            assert_same(values(optimizer, params), before)
    optimizer.check_errors()
    result = values(optimizer, params)
    assert result["step of 0"] == STEPS - 1
    return result


def assert_scaler_skips(
    make: Callable[[], tuple[nn.Module, Any]],
    overflow: Callable[[nn.Module, Tensor], Tensor] = lambda model, loss: loss,
    spoil: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    expected, actual = (trained(*make(), overflow, spoil, scaled) for scaled in (False, True))
    assert_agree(actual, expected)  # the scales are powers of two


@case(2)
def replicas(ranks: int) -> None:
    """The loss of one rank overflows, and with it the mean gradient."""

    def make() -> tuple[nn.Module, Any]:
        net = network().to(device())
        rank = dist.get_rank() if device().type == "cuda" else None
        model = DistributedDataParallel(net, device_ids=None if rank is None else [rank])
        return model, shampoo(net.parameters(), world(), **GIVEN)

    assert_scaler_skips(make, overflow=lambda model, loss: loss * (1e38 if is_last() else 1.0))


@case(2)
def shards(ranks: int) -> None:
    """The shard of one rank overflows."""

    def make() -> tuple[nn.Module, Any]:
        model = fully_shard(network().to(device()), mesh=line(ranks))
        return model, shampoo(model.parameters(), **GIVEN)

    def spoil(model: nn.Module) -> None:
        if is_last():
            next(model.parameters()).grad.to_local()[0, 0] = float("inf")

    assert_scaler_skips(make, spoil=spoil)
