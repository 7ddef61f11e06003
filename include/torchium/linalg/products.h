// Kronecker products, products with bounded memory, and symmetric positive definite systems.
//
// All operands are dense float32, float64, bfloat16 or float16 tensors of one dtype on one device
// (fused_mul_add promotes dtypes). Matrices are the last two dimensions; leading dimensions
// broadcast. bfloat16 and float16 are computed in float32 and rounded once, at the end; autocast
// does not reach inside. A wrong operand is a c10::ValueError that names it; nothing is changed.
//
// Derivatives: kron, kron_matmul, chunked_matmul and fused_mul_add, of any order, in reverse and in
// forward mode. kron_solve, spd_inverse and spd_solve refuse operands that require grad while grad
// mode is on, and those that have a tangent.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace torchium::linalg {

// The Kronecker product A (x) B: [..., m, n], [..., p, q] -> [..., m p, n q].
TORCHIUM_API at::Tensor kron(const at::Tensor& A, const at::Tensor& B);

// (A (x) B) X without forming A (x) B, by one product for each factor.
// A [..., mA, nA], B [..., mB, nB], X [..., nA nB, k] -> [..., mA mB, k].
TORCHIUM_API at::Tensor kron_matmul(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X);

// (A (x) B + damping I)^-1 X without forming A (x) B, from the eigendecompositions of A and B
// (Van Loan 2000, "The ubiquitous Kronecker product").
// A [..., nA, nA] and B [..., nB, nB] symmetric positive semi-definite (they are symmetrised;
// negative eigenvalues count as zero), X [..., nA nB, m] -> [..., nA nB, m]. damping: finite, not
// negative.
//
// Floor: eigenvalues of A (x) B + damping I below (4 + sqrt(n) / 4) epsilon(dtype) times the
// largest, what float arithmetic can tell from zero (summed over n = nA and n = nB), or below the
// smallest normal number, are answered as if they were that. So the answer is finite: what exceeds
// the range of the dtype saturates at its largest number. It is NaN for a pair with NaN or Inf in A
// or B, and for that one only.
TORCHIUM_API at::Tensor kron_solve(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X,
                                   double damping);

// A B with a bounded workspace: [..., m, k], [..., k, n] -> [..., m, n], at least two dimensions
// each.
//
// The workspace is what is needed beside operands and result: float32 copies of bfloat16 or float16
// operands and results, and copies of operands with strides that BLAS cannot read. Leading
// dimensions that broadcast are never copied out. If the workspace of the whole product is larger
// than max_workspace_bytes, it is computed in tiles of rows, columns and matrices. Default: a
// quarter of the free memory of the device, at least 64 MiB. BLAS' own fixed workspace is not
// counted. The derivative keeps to the same bound.
//
// c10::ValueError: not room for one element of the product. c10::OutOfMemoryError: names the sizes
// and what to lower.
TORCHIUM_API at::Tensor chunked_matmul(const at::Tensor& A, const at::Tensor& B,
                                       std::optional<int64_t> max_workspace_bytes = std::nullopt);

// (A + damping I)^-1, exactly symmetric: [..., n, n] -> [..., n, n]. A is symmetric positive
// semi-definite (it is symmetrised); damping finite and not negative.
//
// By Cholesky. A matrix whose factorisation meets a pivot below (4 + sqrt(n) / 4) epsilon(dtype)
// times its largest entry, or breaks down, is answered through its eigendecomposition instead,
// eigenvalues below that fraction of the largest (or below the smallest normal number) as if they
// were it; the other matrices of the batch are not touched by that. On a GPU the host waits for the
// factorisation once, to learn whether there is such a matrix. What exceeds the range of the dtype
// saturates at its largest number. NaN for a matrix with NaN or Inf, and for that one only.
TORCHIUM_API at::Tensor spd_inverse(const at::Tensor& A, double damping = 0.0);

// (A + damping I)^-1 X, as spd_inverse: A [..., n, n], X [..., n, m] -> [..., n, m]. X must be so
// far from the end of the range that X divided by the relative floor, (4 + sqrt(n) / 4) epsilon, is
// in it.
TORCHIUM_API at::Tensor spd_solve(const at::Tensor& A, const at::Tensor& X, double damping = 0.0);

// a * b + c in one pass over memory and with one rounding of bfloat16 and float16 results; shapes
// broadcast and dtypes promote as in torch.addcmul(c, a, b), which computes it on a CPU, for
// operands that differ in shape or dtype, and for strided ones. Contiguous CUDA tensors of one
// shape and dtype take a vectorised kernel in builds with CUDA.
TORCHIUM_API at::Tensor fused_mul_add(const at::Tensor& a, const at::Tensor& b,
                                      const at::Tensor& c);

}  // namespace torchium::linalg
