"""Batched linear algebra."""

from ._estimators import (
    StochasticEstimate,
    hutchinson_diagonal,
    hutchinson_trace,
    hutchpp,
    logdet,
    xdiag,
)
from ._hessian import hvp_operator
from ._krylov import KrylovEigenpairs, arnoldi, lanczos
from ._matrix_functions import (
    InverseRootInfo,
    eigh,
    eigh_retries,
    matrix_inverse_root,
    matrix_power,
)
from ._operators import LinearOperator
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
from ._solvers import SolveResult, cg, gmres
from ._structured import (
    BlockDiag,
    Convolution,
    Dense,
    Diagonal,
    Identity,
    Kronecker,
    LowRankPlusDiagonal,
    Permutation,
    Product,
    Sparse,
    Sum,
    Triangular,
)

__all__ = [
    "BlockDiag",
    "Convolution",
    "Dense",
    "Diagonal",
    "Identity",
    "InverseRootInfo",
    "Kronecker",
    "KrylovEigenpairs",
    "LinearOperator",
    "LowRankPlusDiagonal",
    "Permutation",
    "Product",
    "SolveResult",
    "Sparse",
    "StochasticEstimate",
    "Sum",
    "Triangular",
    "arnoldi",
    "cg",
    "chunked_matmul",
    "eigh",
    "eigh_retries",
    "fused_mul_add",
    "fused_mul_add_",
    "gmres",
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
