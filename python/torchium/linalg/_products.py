"""Kronecker products, products with bounded memory, and symmetric positive definite systems."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ._arguments import check_integer, check_numbers, check_tensors, check_tensors_or_lists

_ops = torch.ops.torchium


def kron(A: Tensor, B: Tensor) -> Tensor:
    """Return the Kronecker product of each matrix of ``A`` with each of ``B``.

    Args:
        A: ``[..., m, n]``, floating point.
        B: ``[..., p, q]``, of the same dtype; leading dimensions broadcast.

    Returns:
        ``[..., m p, n q]``. Differentiable.

    Raises:
        ValueError: types, dtypes, devices or leading dimensions that do not fit.
    """
    check_tensors("kron", A=A, B=B)
    result: Tensor = _ops.kron(A, B)
    return result


@overload
def kron_matmul(A: Tensor, B: Tensor, X: Tensor) -> Tensor: ...


@overload
def kron_matmul(A: Sequence[Tensor], B: Sequence[Tensor], X: Sequence[Tensor]) -> list[Tensor]: ...


def kron_matmul(
    A: Tensor | Sequence[Tensor], B: Tensor | Sequence[Tensor], X: Tensor | Sequence[Tensor]
) -> Tensor | list[Tensor]:
    """Return ``kron(A, B) @ X`` without forming the Kronecker product.

    One matrix product per factor. bfloat16 and float16 are computed in float32. Lists of CUDA tensors
    without leading dimensions take two launches for some 300 pairs of any shapes, if no derivative is
    asked. Other pairs of the same shapes, dtype and device are multiplied together.

    Args:
        A: ``[..., mA, nA]``, floating point. Or three lists of one length.
        B: ``[..., mB, nB]``, of the same dtype.
        X: ``[..., nA nB, k]``, of the same dtype; leading dimensions broadcast.

    Returns:
        ``[..., mA mB, k]``; for lists the list of products. Differentiable.

    Raises:
        ValueError: types, shapes, dtypes or devices that do not fit; names the entry of a list.
    """
    is_one = check_tensors_or_lists("kron_matmul", A=A, B=B, X=X)
    operator = _ops.kron_matmul.default if is_one else _ops.kron_matmul.list
    result: Tensor | list[Tensor] = operator(A, B, X)
    return result


@overload
def kron_solve(A: Tensor, B: Tensor, X: Tensor, damping: float = 0.0) -> Tensor: ...


@overload
def kron_solve(
    A: Sequence[Tensor], B: Sequence[Tensor], X: Sequence[Tensor], damping: float = 0.0
) -> list[Tensor]: ...


def kron_solve(
    A: Tensor | Sequence[Tensor],
    B: Tensor | Sequence[Tensor],
    X: Tensor | Sequence[Tensor],
    damping: float = 0.0,
) -> Tensor | list[Tensor]:
    """Return ``(kron(A, B) + damping I)^-1 X`` without forming the Kronecker product.

    From the eigendecompositions of the factors (Van Loan 2000, "The ubiquitous Kronecker product"):
    ``(Q_A x Q_B) (D_A x D_B + damping)^-1 (Q_A x Q_B)^T X``. Without damping by :func:`spd_solve` of
    each factor. A sum of Kronecker products is an operator that :func:`cg` solves.

    The floor is ``(4 + sqrt(n) / 4) finfo(dtype).eps``, summed over n = nA and n = nB, times the
    largest eigenvalue of the damped product, and at least the smallest normal number. Smaller
    eigenvalues, hidden by rounding errors, count as the floor, so singular factors have a finite
    result. Without damping it is the floor of :func:`spd_solve`, of each factor. Values beyond the
    range of the dtype saturate. A pair with NaN or Inf in a factor yields NaN and does not affect the
    others. bfloat16 and float16 are computed in float32.

    Args:
        A: ``[..., nA, nA]``, symmetric positive semi-definite; symmetrised, negative eigenvalues
            count as zero. Or three lists of one length, of which pairs with the same shapes, dtype
            and device are solved together.
        B: ``[..., nB, nB]``, likewise, of the same dtype.
        X: ``[..., nA nB, m]``, of the same dtype; leading dimensions broadcast.
        damping: finite, not negative (default: 0).

    Returns:
        ``[..., nA nB, m]``; for lists the list of solutions.

    Raises:
        ValueError: types, shapes, dtypes, devices or a damping that do not fit; names the entry of a
            list.
        RuntimeError: an operand requires grad while grad mode is on, or has a tangent of
            forward-mode differentiation.
    """
    is_one = check_tensors_or_lists("kron_solve", A=A, B=B, X=X)
    check_numbers("kron_solve", damping=damping)
    operator = _ops.kron_solve.default if is_one else _ops.kron_solve.list
    result: Tensor | list[Tensor] = operator(A, B, X, damping)
    return result


def chunked_matmul(
    A: Tensor,
    B: Tensor,
    max_workspace_bytes: int | None = None,
    precision: str | None = None,
) -> Tensor:
    """Return ``A @ B`` with a bounded workspace, also for operands in pinned host memory.

    The workspace is the memory of the device in addition to operands and result: float32 copies of
    bfloat16 and float16, copies of operands with strides that BLAS cannot read, fp16 parts, and
    buffers for operands in host memory. Broadcast leading dimensions are never copied. A product
    that would need more is computed in tiles of rows, columns and matrices. BLAS' own fixed
    workspace is not counted. The derivative has the same bound.

    An operand in pinned host memory stays there and is streamed through the CUDA device of the other
    operand, or through the current one; copies to and from the device overlap with products. An
    operand in pageable memory beside it is streamed too, at the lower rate of its copies; one whose
    rows and columns are both not contiguous is copied on the host first. The host waits for copies
    from and to its memory, so such a product cannot be captured in a CUDA graph or compiled.

    Args:
        A: ``[..., m, k]``, floating point, at least two dimensions.
        B: ``[..., k, n]``, of the same dtype; leading dimensions broadcast.
        max_workspace_bytes: the bound; by default a quarter of the free memory of the device, at
            least 64 MiB, at most :func:`torchium.set_workspace_limit`.
        precision: of float32 on a GPU: ``"highest"`` or ``"high"`` (TF32: operands of 11 bits); by
            default torch's setting. ``"highest"`` of large matrices on Hopper multiplies two fp16
            parts of each operand, 22 bits, with a scale for each row of ``A`` and column of ``B``
            (Ootomo and Yokota 2022, arXiv 2203.03341), else it computes in float32: also where the
            workspace does not hold the parts, 4 bytes per element. There a row of ``A`` or column of
            ``B`` with Inf gives NaN or Inf.

    Returns:
        ``[..., m, n]``, equal to ``torch.matmul`` up to rounding. Differentiable. On the device if an
        operand is and the free memory holds the result, else in pinned host memory.

    Raises:
        ValueError: types, shapes, dtypes or devices that do not fit, an unknown precision, or a bound
            too small for one element of the product.
        torch.OutOfMemoryError: names the sizes and the remedy.
    """
    check_tensors("chunked_matmul", A=A, B=B)
    if max_workspace_bytes is not None:
        check_integer(
            "chunked_matmul",
            "max_workspace_bytes",
            max_workspace_bytes,
            "it must be an integer below 2**63, or None.",
        )
    if precision is not None and not isinstance(precision, str):
        raise ValueError(
            f"chunked_matmul: precision is {precision!r}; it must be 'highest' or 'high', or None "
            "for torch's setting"
        )
    result: Tensor = _ops.chunked_matmul(
        A, B, max_workspace_bytes=max_workspace_bytes, precision=precision
    )
    return result


def spd_inverse(A: Tensor, *, damping: float = 0.0) -> Tensor:
    """Return ``(A + damping I)^-1`` for symmetric positive semi-definite ``A``.

    By Cholesky. If the factorisation of a matrix breaks down, or meets a pivot below
    ``(4 + sqrt(n) / 4) finfo(dtype).eps`` times its largest entry, that matrix is solved by its
    eigendecomposition. Its eigenvalues below that fraction of the largest, or below the smallest
    normal number, count as that floor, so zero and rank-deficient matrices have a finite result.
    Values beyond the range of the dtype saturate. In float64 on a GPU the host waits once, to find
    the matrices that need this. A matrix with NaN or Inf yields NaN and does not affect the others.
    bfloat16 and float16 are computed in float32.

    In float32 and 16 bits on a GPU by :func:`matrix_inverse_root` of root 1, with its floor, and a
    step of Newton's method, without a host wait. Up to n = 256 that is left to matrices with a pivot
    that small; the others are inverted by the sweep operator in one launch.

    Args:
        A: ``[..., n, n]``, floating point; symmetrised.
        damping: finite, not negative.

    Returns:
        ``[..., n, n]``, exactly symmetric.

    Raises:
        ValueError: a type, shape, dtype or damping that does not fit.
        RuntimeError: ``A`` requires grad while grad mode is on, or has a tangent of forward-mode
            differentiation.
    """
    check_tensors("spd_inverse", A=A)
    check_numbers("spd_inverse", damping=damping)
    result: Tensor = _ops.spd_inverse(A, damping=damping)
    return result


def spd_solve(A: Tensor, X: Tensor, *, damping: float = 0.0) -> Tensor:
    """Return ``(A + damping I)^-1 X`` for symmetric positive semi-definite ``A``.

    As :func:`spd_inverse`, without forming the inverse. ``X`` divided by the relative floor,
    ``(4 + sqrt(n) / 4) eps``, must be within the range of the dtype.

    Args:
        A: ``[..., n, n]``, floating point; symmetrised.
        X: ``[..., n, m]``, of the same dtype; leading dimensions broadcast.
        damping: finite, not negative.

    Returns:
        ``[..., n, m]``.

    Raises:
        ValueError: types, shapes, dtypes, devices or a damping that do not fit.
        RuntimeError: an operand requires grad while grad mode is on, or has a tangent of
            forward-mode differentiation.
    """
    check_tensors("spd_solve", A=A, X=X)
    check_numbers("spd_solve", damping=damping)
    result: Tensor = _ops.spd_solve(A, X, damping=damping)
    return result


def fused_mul_add(a: Tensor, b: Tensor, c: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``a * b + c`` in one pass over memory.

    Shapes broadcast and dtypes promote as in ``torch.addcmul(c, a, b)``. Contiguous CUDA tensors of
    equal shape and dtype use a vectorised kernel, all others ``torch.addcmul``. bfloat16 and float16
    are computed in float32 and rounded once. Differentiable without ``out``.

    Args:
        a, b, c: float32, float64, bfloat16 or float16.
        out: of the shape and dtype of the result, may be one of the operands, but not share a part
            of its memory; it is written and returned.

    Raises:
        ValueError: an operand that is not a dense floating point tensor, shapes or devices that do
            not fit, or an ``out`` that does not.
        RuntimeError: with ``out``, an operand that requires grad while gradients are recorded.
    """
    check_tensors("fused_mul_add", a=a, b=b, c=c)
    if out is None:
        result: Tensor = _ops.fused_mul_add.default(a, b, c)
        return result
    check_tensors("fused_mul_add", out=out)
    _ops.fused_mul_add.out(a, b, c, out=out)
    return out


def fused_mul_add_(a: Sequence[Tensor], b: Sequence[Tensor], c: Sequence[Tensor]) -> None:
    """Compute ``c[i] = a[i] * b[i] + c[i]`` in place, for lists of tensors.

    Contiguous CUDA tensors of equal shapes take one launch per 800 entries, also of mixed shapes and
    dtypes; all others ``torch.Tensor.addcmul_``.

    Args:
        a, b: ``a[i]`` and ``b[i]`` are of the dtype of ``c[i]`` and broadcast to its shape.
        c: float32, float64, bfloat16 or float16. Its entries must not overlap each other or other
            operands, except ``a[i]`` or ``b[i]`` as a whole.

    Raises:
        ValueError: lists of different lengths, or an entry that does not fit; names it. Nothing is
            changed.
        RuntimeError: an entry that requires grad while gradients are recorded.
    """
    try:
        if torch.compiler.is_compiling():
            _ops.fused_mul_add_.default(a, b, c)
        else:  # half the time, see the operator; called itself it would search the lists for script objects
            references = torch.classes.torchium.TensorReferences()
            _ops.fused_mul_add_.keeping._op(a, b, c, references)
    except (TypeError, RuntimeError):
        _check_lists("fused_mul_add_", a=a, b=b, c=c)  # only now: it takes as long as the operator
        raise


def _check_lists(function: str, **lists: Any) -> None:
    for name, entries in lists.items():
        if not isinstance(entries, (list, tuple)):
            raise ValueError(
                f"{function}: {name} is of type {type(entries).__name__}; it must be a list or "
                "tuple of tensors. For single tensors use fused_mul_add(a, b, c, out=c)."
            )
        check_tensors(function, **{f"{name}[{i}]": x for i, x in enumerate(entries)})
