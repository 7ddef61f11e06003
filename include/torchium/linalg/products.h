// Kronecker products, products with bounded memory, and symmetric positive definite systems.
//
// All operands are dense float32, float64, bfloat16 or float16 tensors of one dtype on one device
// (fused_mul_add promotes dtypes; chunked_matmul takes operands in host memory besides those on a
// device). Matrices are the last two dimensions; leading dimensions broadcast. bfloat16 and float16
// are computed in float32 and rounded once, at the end; autocast has no effect. A wrong operand
// raises a c10::ValueError that names it; nothing is changed.
//
// Derivatives: kron, kron_matmul, chunked_matmul and fused_mul_add, of any order, in reverse and
// forward mode. kron_solve, spd_inverse and spd_solve raise an error if an operand requires grad
// while grad mode is on, or has a tangent.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchium::linalg {

// The Kronecker product A (x) B: [..., m, n], [..., p, q] -> [..., m p, n q].
TORCHIUM_API at::Tensor kron(const at::Tensor& A, const at::Tensor& B);

// (A (x) B) X without forming A (x) B: one product per factor.
// A [..., mA, nA], B [..., mB, nB], X [..., nA nB, k] -> [..., mA mB, k].
TORCHIUM_API at::Tensor kron_matmul(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X);

// The same for each A[i], B[i] and X[i] of three lists of one length. CUDA tensors without leading
// dimensions take two launches for some 300 pairs of any shapes, if no derivative is needed. All
// others of the same shapes, dtype and device are multiplied together.
TORCHIUM_API std::vector<at::Tensor> kron_matmul(at::TensorList A, at::TensorList B,
                                                 at::TensorList X);

// (A (x) B + damping I)^-1 X without forming A (x) B, from the eigendecompositions of A and B
// (Van Loan 2000, "The ubiquitous Kronecker product"), or without damping by spd_solve of each
// factor.
// A [..., nA, nA] and B [..., nB, nB] symmetric positive semi-definite (they are symmetrised;
// negative eigenvalues count as zero), X [..., nA nB, m] -> [..., nA nB, m]. damping: finite, not
// negative.
//
// Floor: (4 + sqrt(n) / 4) epsilon(dtype), summed over n = nA and n = nB, times the largest
// eigenvalue of A (x) B + damping I, and at least the smallest normal number. Smaller eigenvalues,
// hidden by rounding errors, count as the floor, so the result is finite. Without damping it is the
// floor of spd_solve, of each factor. Values beyond the range of the dtype saturate. A pair with
// NaN or Inf in A or B yields NaN and does not affect the others.
TORCHIUM_API at::Tensor kron_solve(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X,
                                   double damping = 0.0);

// The same for each A[i], B[i] and X[i] of three lists of one length. Pairs of the same shapes,
// dtype and device are solved together.
TORCHIUM_API std::vector<at::Tensor> kron_solve(at::TensorList A, at::TensorList B,
                                                at::TensorList X, double damping = 0.0);

// A B with a bounded workspace: [..., m, k], [..., k, n] -> [..., m, n]. Each operand has at least
// two dimensions.
//
// The workspace is the memory of the device in addition to operands and result: float32 copies of
// bfloat16 or float16 operands and results, copies of operands with strides that BLAS cannot read,
// fp16 parts, and buffers for operands in host memory. Broadcast leading dimensions are never
// copied. If the whole product would need more than max_workspace_bytes, it is computed in tiles of
// rows, columns and matrices. Default: a quarter of the device's free memory, at least 64 MiB, at
// most workspace_limit(). BLAS' own fixed workspace is not counted. The derivative has the same
// bound.
//
// precision, of float32 on a GPU: "highest" or "high" (TF32: operands of 11 bits); std::nullopt:
// torch's setting. On Hopper, "highest" multiplies two fp16 parts of each operand of a large
// product, 22 bits, with a scale for each row of A and column of B (Ootomo and Yokota 2022, arXiv
// 2203.03341). A row of A or column of B with Inf then gives NaN or Inf. Smaller products, and
// those whose parts (4 bytes per element) do not fit in the workspace, are computed in float32.
//
// An operand in pinned host memory stays there and is streamed through the CUDA device of the other
// operand, or through the current one. Copies to and from the device overlap with products. An
// operand in pageable memory beside it is streamed too, at the lower rate of its copies; one whose
// rows and columns are both not contiguous is copied on the host first. The result is on the device
// if an operand is and the free memory holds it, else in pinned host memory. The host waits for
// copies from and to its memory, so such a product cannot be captured in a CUDA graph.
//
// c10::ValueError: the bound is too small for one element of the product. c10::OutOfMemoryError:
// names the sizes and the remedy.
TORCHIUM_API at::Tensor chunked_matmul(const at::Tensor& A, const at::Tensor& B,
                                       std::optional<int64_t> max_workspace_bytes = std::nullopt,
                                       const std::optional<std::string>& precision = std::nullopt);

// (A + damping I)^-1, exactly symmetric: [..., n, n] -> [..., n, n]. A is symmetric positive
// semi-definite (it is symmetrised); damping finite and not negative.
//
// By Cholesky decompositions. If the factorisation of a matrix breaks down, or meets a pivot below
// (4 + sqrt(n) / 4) epsilon(dtype) times its largest entry, that matrix is solved by its
// eigendecomposition instead. Eigenvalues below that fraction of the largest, or below the smallest
// normal number, count as that floor. In float64 on a GPU the host waits once, to find these
// matrices. Values beyond the range of the dtype saturate. A matrix with NaN or Inf yields NaN and
// does not affect the others.
//
// Float32 and 16-bit matrices on a GPU are inverted without a host wait by matrix_inverse_root of
// root 1, with its floor, and a step of Newton's method. Up to n = 256 that is left to matrices
// with a pivot that small; the others are inverted by the sweep operator in one launch (Goodnight
// 1979).
TORCHIUM_API at::Tensor spd_inverse(const at::Tensor& A, double damping = 0.0);

// (A + damping I)^-1 X, as spd_inverse: A [..., n, n], X [..., n, m] -> [..., n, m]. X divided by
// the relative floor, (4 + sqrt(n) / 4) epsilon, must be within the range of the dtype.
TORCHIUM_API at::Tensor spd_solve(const at::Tensor& A, const at::Tensor& X, double damping = 0.0);

// a * b + c in one pass over memory; bfloat16 and float16 results are rounded once. Shapes
// broadcast and dtypes promote as in torch.addcmul(c, a, b). Contiguous CUDA tensors of equal shape
// and dtype use a vectorised kernel, all others torch.addcmul.
//
// out has the shape and dtype of the result. It may be one of the operands, but must not share only
// a part of an operand's memory. It is written and returned. With out, no operand may require grad
// while grad mode is on.
TORCHIUM_API at::Tensor fused_mul_add(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                                      const std::optional<at::Tensor>& out = std::nullopt);

// c[i] = a[i] * b[i] + c[i] in place, for lists of one length. a[i] and b[i] are of the dtype of
// c[i] and broadcast to its shape. Contiguous CUDA tensors of equal shapes take one launch per 800
// entries, also of mixed shapes and dtypes. The entries of c must not overlap each other or other
// operands, except a[i] or b[i] as a whole. Errors as above, also where an entry requires grad
// while grad mode is on; nothing is changed then.
TORCHIUM_API void fused_mul_add_(at::TensorList a, at::TensorList b, at::TensorList c);

}  // namespace torchium::linalg
