#include "linalg/products/kronecker.h"

#include "linalg/bounded_solution.h"
#include "linalg/operand_checks.h"
#include "linalg/products/symmetric_storage.h"
#include "linalg/spectral/eigh.h"
#include "linalg/spectral/spectral.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/unflatten.h>
#include <c10/util/Exception.h>

#include <array>
#include <limits>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// (A (x) B) X for operands of one dtype. X is row-major in the column pairs (i, j) of A and B. With
// X as [nA, nB, k] the result is sum_ij A[a, i] B[b, j] X[i, j, :]: one product per factor.
at::Tensor apply_factors(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X) {
  const auto nB = B.sym_size(-1);
  const auto k = X.sym_size(-1);
  auto Y = at::unflatten_symint(X, -2, std::array{A.sym_size(-1), nB}).flatten(-2);
  Y = at::unflatten_symint(at::matmul(A, Y), -1, std::array{nB, k});  // [..., mA, nB, k]
  Y = at::matmul(B, Y.transpose(-3, -2).flatten(-2));                 // [..., mB, mA k]
  Y = at::unflatten_symint(Y, -1, std::array{A.sym_size(-2), k});     // [..., mB, mA, k]
  return Y.transpose(-3, -2).flatten(-3, -2);
}

// Returns the sizes of the result, [..., nA nB, m].
std::vector<c10::SymInt> check_kron_solve(const at::Tensor& A, const at::Tensor& B,
                                          const at::Tensor& X, double damping) {
  constexpr auto op = "kron_solve";
  check_matrices(op, {{"A", A}, {"B", B}, {"X", X}});
  check_square(op, {"A", A});
  check_square(op, {"B", B});
  check_damping(op, damping, X);
  TORCH_CHECK_VALUE(A.sym_size(-1) * B.sym_size(-1) == X.sym_size(-2), op, ": X has shape ",
                    X.sym_sizes(), "; with A ", A.sym_sizes(), " and B ", B.sym_sizes(),
                    " it must be [..., ", A.sym_size(-1) * B.sym_size(-1), ", m]");
  auto sizes = broadcast_batch(op, {{"A", A}, {"B", B}, {"X", X}});
  sizes.insert(sizes.end(), {X.sym_size(-2), X.sym_size(-1)});
  return sizes;
}

struct FactorSpectrum {
  at::Tensor values;   // [..., n] float64, not negative
  at::Tensor vectors;  // [..., n, n]
  at::Tensor finite;   // [...]: no NaN or Inf in the matrix
};

// Of (A + A^T) / 2. Negative eigenvalues, rounding errors of a semi-definite matrix, count as zero.
FactorSpectrum spectrum_of(const at::Tensor& A, at::ScalarType dtype) {
  const auto batch = A.sizes().slice(0, A.dim() - 2);
  const auto input = normalize_symmetric(as_batch(A.to(dtype)), /*eps=*/0.0);
  const auto [values, vectors] = symmetric_eigensystem(input.matrix);
  const auto eigenvalues = values.to(at::kDouble).clamp_min_(0.0).div_(input.scale.unsqueeze(-1));
  return {restore_batch(eigenvalues, batch), restore_batch(vectors, batch),
          restore_batch(input.finite, batch)};
}

}  // namespace

at::Tensor kron(const at::Tensor& A, const at::Tensor& B) {
  check_matrices("kron", {{"A", A}, {"B", B}});
  broadcast_batch("kron", {{"A", A}, {"B", B}});
  // [m, 1, n, 1] * [1, p, 1, q]
  const auto product = A.unsqueeze(-1).unsqueeze(-3) * B.unsqueeze(-2).unsqueeze(-4);
  return product.flatten(-4, -3).flatten(-2);
}

at::Tensor kron_matmul(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X) {
  constexpr auto op = "kron_matmul";
  check_matrices(op, {{"A", A}, {"B", B}, {"X", X}});
  TORCH_CHECK_VALUE(A.sym_size(-1) * B.sym_size(-1) == X.sym_size(-2), op, ": X has shape ",
                    X.sym_sizes(), "; with A ", A.sym_sizes(), " and B ", B.sym_sizes(),
                    " it must be [..., ", A.sym_size(-1) * B.sym_size(-1), ", m]");
  broadcast_batch(op, {{"A", A}, {"B", B}, {"X", X}});
  const auto dtype = compute_dtype(X);
  return apply_factors(A.to(dtype), B.to(dtype), X.to(dtype)).to(X.scalar_type());
}

at::Tensor kron_solve_meta(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X,
                           double damping) {
  return at::empty_symint(check_kron_solve(A, B, X, damping), X.options());
}

// With A = Q_A D_A Q_A^T and B = Q_B D_B Q_B^T the solution is
// (Q_A (x) Q_B) (D_A (x) D_B + damping)^-1 (Q_A (x) Q_B)^T X (Van Loan 2000, "The ubiquitous
// Kronecker product").
at::Tensor kron_solve(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X,
                      double damping) {
  const auto result_sizes = check_kron_solve(A, B, X, damping);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(result_sizes);
  if (c10::multiply_integers(sizes) == 0) return at::empty(sizes, X.options());
  const auto dtype = compute_dtype(X);
  const auto a = spectrum_of(A, dtype);
  const auto b = spectrum_of(B, dtype);

  // In float64 the product of two float32 eigenvalues neither overflows nor underflows.
  const auto damped = (a.values.unsqueeze(-1) * b.values.unsqueeze(-2))
                          .flatten(-2)
                          .add_(damping)
                          .clamp_max_(std::numeric_limits<double>::max());
  const double noise = eigenvalue_noise(A.size(-1), dtype) + eigenvalue_noise(B.size(-1), dtype);
  const auto floor = damped.amax(-1, /*keepdim=*/true).mul_(noise);
  const auto eigenvalues = at::maximum(damped, floor.clamp_min_(smallest_normal(dtype)));

  // Weights of at most one: values beyond the range appear only after the last sum, and saturate.
  const auto smallest = eigenvalues.amin(-1, /*keepdim=*/true);
  const auto weights = (smallest / eigenvalues).to(dtype);
  const auto rotated = apply_factors(a.vectors.mT(), b.vectors.mT(), X.to(dtype));
  const auto solution = apply_factors(a.vectors, b.vectors, rotated.mul(weights.unsqueeze(-1)));
  return bounded_solution(solution, smallest.squeeze(-1).reciprocal(),
                          a.finite.logical_and(b.finite), X.scalar_type());
}

}  // namespace torchium::linalg::detail
