// Some eigenpairs of large matrices that are known by their products, by Krylov methods.
//
// Both methods build an orthonormal basis V of a Krylov space with full re-orthogonalisation,
// solve the small problem H = V^T A V in float64 on the host, and restart from the best part of
// the space until the residuals |A x - lambda x| are small (thick restarts: Wu and Simon 2000,
// "Thick-restart Lanczos method for large symmetric eigenvalue problems"; Stewart 2002, "A
// Krylov-Schur algorithm for large eigenproblems"). lanczos also stops in between. On a GPU
// the host waits a few times per restart, not once per product. Of a dense float32 matrix of order
// 6144 or more on a Hopper GPU, lanczos reads one triangle only in all products but the first.
#pragma once

#include <torchium/export.h>
#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace torchium::linalg {

struct KrylovOptions {
  // Which eigenvalues. lanczos: "LA" (largest, default), "SA" (smallest), "LM" (largest magnitude).
  // arnoldi: "LM" (default), "LR" and "SR" (largest and smallest real part), "LI" (largest
  // imaginary part in magnitude).
  std::string which;
  // Columns per product; at least the multiplicity sought. Default: those of `start`, or 8 for a
  // dense float32 matrix on a GPU, which multiplies 8 columns as fast as one, otherwise 1.
  std::optional<int64_t> block_size;
  // Columns of V. Default: max(2 k + 1, 20, 10 block_size) + 2 block_size.
  std::optional<int64_t> max_basis;
  int64_t max_restarts = 100;
  // An eigenpair has converged if its residual is at most tol times the largest magnitude of an
  // eigenvalue of H, or if it is a rounding error, also of the restarts, that no longer falls
  // (tol 0). Default: epsilon(dtype)^(2/3).
  std::optional<double> tol;
  at::Tensor start;   // [n] or [n, block_size]; default: random signs
  uint64_t seed = 0;  // of the random signs, which are equal on every device
};

struct KrylovEigenpairs {
  at::Tensor eigenvalues;     // [k], the most wanted first; complex for arnoldi
  at::Tensor eigenvectors;    // [n, k], columns of norm 1
  at::Tensor residual_norms;  // [k]: |A x - lambda x|
  at::Tensor converged;       // [k], bool
  int64_t products = 0;       // columns that A has been multiplied by
};

// k eigenpairs of a symmetric A; none: 6, or all of a smaller matrix. c10::ValueError: options that
// do not fit, products that are not finite, or A that is not symmetric. Warns if an eigenpair has
// not converged.
TORCHIUM_API KrylovEigenpairs lanczos(const LinearOperator& A,
                                      std::optional<int64_t> k = std::nullopt,
                                      const KrylovOptions& options = {});

// k eigenpairs of a general real A; complex ones come in conjugate pairs, of which the last may be
// cut off. k and errors as lanczos.
TORCHIUM_API KrylovEigenpairs arnoldi(const LinearOperator& A,
                                      std::optional<int64_t> k = std::nullopt,
                                      const KrylovOptions& options = {});

}  // namespace torchium::linalg
