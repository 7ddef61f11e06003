"""Steps that the ranks of a process group share (``src/optim/sharing/shared_plans.h``)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed

from ..._callers import users_stacklevel
from .._core.process_groups import group_name, processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Of the constructors.
SHARING_ARGUMENTS = ("process_group", "comm_dtype", "bucket_bytes")
_COMM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Sharing(NamedTuple):
    """Names the group, so that copies and pickles of an optimizer share with it too."""

    group_name: str  # empty: none
    comm_dtype: torch.dtype
    bucket_bytes: int

    @classmethod
    def of(
        cls, process_group: ProcessGroup | None, comm_dtype: torch.dtype, bucket_bytes: int
    ) -> Sharing:
        """Raises ValueError for a wrong argument."""
        if comm_dtype not in _COMM_DTYPES:
            names = ", ".join(str(dtype) for dtype in _COMM_DTYPES)
            raise ValueError(
                f"comm_dtype must be one of {names}, got {comm_dtype!r}{_remedy(comm_dtype)}"
            )
        is_integer = isinstance(bucket_bytes, int) and not isinstance(bucket_bytes, bool)
        if not is_integer or not 1 <= bucket_bytes < 2**63:
            raise ValueError(
                f"bucket_bytes must be an integer from 1 to 2**63 - 1, got {bucket_bytes!r}"
            )
        return cls(group_name(process_group), comm_dtype, bucket_bytes)

    @classmethod
    def none(cls) -> Sharing:
        return cls("", torch.float32, 1)


def _remedy(comm_dtype: Any) -> str:
    """What to pass instead of the name of a dtype."""
    named = [dtype for dtype in _COMM_DTYPES if f"torch.{comm_dtype}" == str(dtype)]
    return f"; pass {named[0]}" if named else ""


def warn_of_repeated_work(optimizer: str) -> None:
    """Warns if several processes run and each takes the whole step."""
    ranks = processes()
    if ranks > 1:
        warnings.warn(
            f"each of {ranks} processes repeats the whole step of {optimizer}. If they have the same "
            f"parameters and gradients, as under DistributedDataParallel, share it: {optimizer}(..., "
            "process_group=torch.distributed.group.WORLD). Under ZeroRedundancyOptimizer nothing is "
            "repeated",
            stacklevel=users_stacklevel(),
        )
