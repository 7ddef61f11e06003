"""Models whose parameters are sharded have no per-sample gradients: they would be zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchium
from torch import Tensor, nn
from torch.nn import functional as F
from torchium import gradients


def rows_of_block(model: nn.Module, loss_fn: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    with torchium.per_sample(model):
        loss_fn(model(x), y).backward()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "per_sample": rows_of_block,
    "per_sample_gradients": gradients.per_sample_gradients,
    "per_sample_norms": gradients.per_sample_norms,
    "gram": gradients.gram,
    "jvp_dots": lambda *batch: gradients.jvp_dots(*batch, dict(batch[0].named_parameters())),
    "clip_and_accumulate": lambda *batch: gradients.clip_and_accumulate(*batch, 1.0),
}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def fully_sharded(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def flat_sharded(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("make", [fully_sharded, flat_sharded])
def test_sharded_parameters_are_refused_by_name(function, make, mesh):
    model = make(mesh)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    with pytest.raises(ValueError, match=r"parameter '.*0\.weight' is sharded.*DistributedData"):
        FUNCTIONS[function](model, F.cross_entropy, x, y)
    assert all(p.grad is None for p in model.parameters())
