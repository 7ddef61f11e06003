"""Parameters of which each rank holds a shard."""

from __future__ import annotations

import sys

from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    # No tensor is a DTensor before its module, slow to import, is loaded.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, in the same memory; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # to_local() is for autograd
    # The result of a collective that has not been waited for.
    return local.wait() if hasattr(local, "wait") else local


def is_flat_shard(param: Tensor) -> bool:
    """Whether it is one of FullyShardedDataParallel (FSDP1), which has lost its shape."""
    return getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False)
