"""Batched linear algebra."""

from ._matrix_functions import (
    InverseRootInfo,
    eigh,
    eigh_retries,
    matrix_inverse_root,
    matrix_power,
)
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
    "InverseRootInfo",
    "chunked_matmul",
    "eigh",
    "eigh_retries",
    "fused_mul_add",
    "kron",
    "kron_matmul",
    "kron_solve",
    "matrix_inverse_root",
    "matrix_power",
    "spd_inverse",
    "spd_solve",
]
