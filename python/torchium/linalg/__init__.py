"""Linear algebra on stacks of matrices: everything of ``torch.ops.torchium`` that is no optimizer."""

from ._products import (
    chunked_matmul,
    fused_mul_add,
    kron,
    kron_matmul,
    kron_solve,
    spd_inverse,
    spd_solve,
)

__all__ = [
    "chunked_matmul",
    "fused_mul_add",
    "kron",
    "kron_matmul",
    "kron_solve",
    "spd_inverse",
    "spd_solve",
]
