"""Batched linear algebra."""

from ._estimators import (
    StochasticEstimate,
    hutchinson_diagonal,
    hutchinson_trace,
    hutchpp,
    logdet,
    xdiag,
)
from ._krylov import KrylovEigenpairs, arnoldi, lanczos
from ._matrix_functions import (
    InverseRootInfo,
    eigh,
    eigh_retries,
    matrix_inverse_root,
    matrix_power,
)
from ._operators import LinearOperator, hvp_operator
from ._products import (
    chunked_matmul,
    fused_mul_add,
    fused_mul_add_,
    kron,
    kron_matmul,
    kron_solve,
    spd_inverse,
    spd_solve,
)

__all__ = [
    "InverseRootInfo",
    "KrylovEigenpairs",
    "LinearOperator",
    "StochasticEstimate",
    "arnoldi",
    "chunked_matmul",
    "eigh",
    "eigh_retries",
    "fused_mul_add",
    "fused_mul_add_",
    "hutchinson_diagonal",
    "hutchinson_trace",
    "hutchpp",
    "hvp_operator",
    "kron",
    "kron_matmul",
    "kron_solve",
    "lanczos",
    "logdet",
    "matrix_inverse_root",
    "matrix_power",
    "spd_inverse",
    "spd_solve",
    "xdiag",
]
