// Cholesky, polar and singular value decompositions of batches of matrices.
//
// A: a dense float32, float64, bfloat16 or float16 tensor of matrices, the last two dimensions.
// bfloat16 and float16 are computed in float32 or better and rounded once, at the end; autocast has
// no effect. A wrong operand raises a c10::ValueError that names it; nothing is changed. An error
// is raised if A requires grad while grad mode is on, or has a tangent: there are no derivatives.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>

#include <optional>

namespace torchium::linalg {

struct CholeskyFactor {
  at::Tensor L;       // [..., n, n], lower triangular
  at::Tensor jitter;  // [...] float64: what was added to the diagonal
};

// L L^T = A + (damping + jitter) I for A [..., n, n] (it is symmetrised). damping: finite, not
// negative.
//
// A matrix that breaks down is tried again with a jitter of 1, then 100 times the rounding error of
// an eigenvalue: (4 + sqrt(n) / 4) epsilon(dtype) times the largest entry, at least the smallest
// normal number. If that is not enough, its L and jitter are NaN, as for a matrix with NaN or Inf.
// The host reads nothing from a GPU, which factors all matrices three times.
TORCHIUM_API CholeskyFactor cholesky(const at::Tensor& A, double damping = 0.0);

// log det (A + (damping + jitter) I), [...], from the factor and with the jitter of cholesky; NaN
// where that is. In float32 for 16-bit matrices.
TORCHIUM_API at::Tensor spd_logdet(const at::Tensor& A, double damping = 0.0);

// U V^T for A = U S V^T, the orthonormal matrix closest to A: [..., m, n] -> [..., m, n].
//
// Singular values above rcond times the largest become one. Smaller ones, among them zeros that
// rounding errors hide, become a number up to one. rcond is above 0 and below 1; its default and
// least value is epsilon(dtype), that of float32 for 16-bit matrices. A matrix with NaN or Inf
// yields NaN.
//
// Float32 and 16-bit matrices on a GPU with fast float64 (compute capability 8.0, 9.0 or 10.0) take
// products in float64, without a host wait: 15 steps of three products by default, 7 with rcond =
// 0.01 (Polar Express, Amsel et al. 2025, arXiv 2505.16932). All others take at::linalg_svd.
TORCHIUM_API at::Tensor orthogonalize(const at::Tensor& A,
                                      std::optional<double> rcond = std::nullopt);

struct PolarFactors {
  at::Tensor U;  // [..., m, n]: orthogonalize(A)
  at::Tensor H;  // [..., n, n]: V S V^T, exactly symmetric; saturates
};

// The polar decomposition A = U H. As orthogonalize.
TORCHIUM_API PolarFactors polar(const at::Tensor& A, std::optional<double> rcond = std::nullopt);

struct SingularValues {
  at::Tensor U;   // [..., m, k], orthonormal columns
  at::Tensor S;   // [..., k], descending, not negative; saturates
  at::Tensor Vh;  // [..., k, n], orthonormal rows
};

// A = U S V^T for A [..., m, n], with k = min(m, n).
//
// On a GPU with fast float64, float32 and 16-bit matrices are solved all at once, without a host
// wait, from the polar factor in float64 and the eigenproblem of H (Higham and Papadimitriou 1994).
// Errors are those of float32 symmetric eigenproblems. Measured at k = 1024, in units of epsilon
// (for S and U S V^T, times the largest singular value): 2 of S, 13 of U S V^T, 8 of U^T U and of
// V^T V (benchmarks/results/linalg_h200.md). All others take at::linalg_svd. A matrix with NaN or
// Inf yields NaN.
TORCHIUM_API SingularValues svd(const at::Tensor& A);

}  // namespace torchium::linalg
