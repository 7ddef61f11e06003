#include "linalg/kronecker/kronecker.h"

#include "linalg/common/bounded_solution.h"
#include "linalg/common/operand_checks.h"
#include "linalg/decompositions/spd.h"
#include "linalg/products/symmetric_storage.h"
#include "linalg/spectral/eigh.h"
#include "linalg/spectral/spectral.h"
#include "linalg/spectral/unit_scale.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// (A (x) B) X for two linear maps, each a function of [..., n, q] -> [..., m, q]. X is row-major in
// the column pairs (i, j) of A and B. With X as [nA, nB, k] the result is
// sum_ij A[a, i] B[b, j] X[i, j, :].
template <typename Left, typename Right>
at::Tensor map_factors(const Left& by_A, const Right& by_B, const c10::SymInt& nA,
                       const c10::SymInt& nB, const at::Tensor& X) {
  const auto k = X.sym_size(-1);
  auto Y = by_A(at::unflatten_symint(X, -2, std::array{nA, nB}).flatten(-2));
  const auto mA = Y.sym_size(-2);
  Y = at::unflatten_symint(Y, -1, std::array{nB, k});  // [..., mA, nB, k]
  Y = by_B(Y.transpose(-3, -2).flatten(-2));           // [..., mB, mA k]
  Y = at::unflatten_symint(Y, -1, std::array{mA, k});  // [..., mB, mA, k]
  return Y.transpose(-3, -2).flatten(-3, -2);
}

// (A (x) B) X for operands of one dtype: one product per factor.
at::Tensor apply_factors(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X) {
  const auto times = [](const at::Tensor& M) {
    return [M](const at::Tensor& Y) { return at::matmul(M, Y); };
  };
  return map_factors(times(A), times(B), A.sym_size(-1), B.sym_size(-1), X);
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
FactorSpectrum factor_spectrum(const at::Tensor& A, at::ScalarType dtype) {
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

namespace {

// A matrix [..., n, n] in units of its largest entry. A zero matrix counts as its floor, the
// smallest normal number, in units of that.
UnitScaled unit_factor(const at::Tensor& M, at::ScalarType dtype) {
  const auto batch = M.sizes().slice(0, M.dim() - 2);
  const UnitScaled unit = unit_scaled(as_batch(M.to(dtype)));
  const at::Tensor is_zero = (unit.matrix == 0).all(-1, /*keepdim=*/true).all(-2, /*keepdim=*/true);
  const at::Tensor identity = at::eye(M.size(-1), unit.matrix.options());
  const int least = std::ilogb(smallest_normal(dtype));
  return {restore_batch(at::where(is_zero, identity, unit.matrix), batch),
          restore_batch(unit.exponent.masked_fill(is_zero, least), batch),
          restore_batch(unit.finite, batch)};
}

// (A^-1 (x) B^-1) X, factor by factor: by Cholesky, or on a GPU by the iteration for inverses.
at::Tensor solve_by_factors(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X) {
  const at::Tensor Y = X.to(compute_dtype(X));
  const UnitScaled a = unit_factor(A, Y.scalar_type()), b = unit_factor(B, Y.scalar_type());
  // NaN and Inf stay in their columns.
  const at::Tensor finite_part = at::where(at::isfinite(Y), Y, at::zeros_like(Y));
  const at::Tensor exponent =
      restore_batch(unit_scaled(as_batch(finite_part)).exponent, X.sizes().slice(0, X.dim() - 2));
  const auto inverse_of = [](const UnitScaled& M) {
    return [&M](const at::Tensor& R) { return spd_solve(M.matrix, R, /*damping=*/0.0); };
  };
  const at::Tensor solution = map_factors(inverse_of(a), inverse_of(b), A.size(-1), B.size(-1),
                                          times_power_of_two(Y, -exponent));
  const at::Tensor scaled = times_power_of_two(solution, exponent - a.exponent - b.exponent);
  const at::Tensor finite = a.finite.logical_and(b.finite);
  return saturated(
      scaled.masked_fill(finite.logical_not(), std::numeric_limits<double>::quiet_NaN()),
      X.scalar_type());
}

}  // namespace

// With A = Q_A D_A Q_A^T and B = Q_B D_B Q_B^T the solution is
// (Q_A (x) Q_B) (D_A (x) D_B + damping)^-1 (Q_A (x) Q_B)^T X (Van Loan 2000, "The ubiquitous
// Kronecker product").
at::Tensor kron_solve(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X,
                      double damping) {
  const auto result_sizes = check_kron_solve(A, B, X, damping);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(result_sizes);
  if (c10::multiply_integers(sizes) == 0) return at::empty(sizes, X.options());
  if (damping == 0.0) return solve_by_factors(A, B, X).contiguous();
  const auto dtype = compute_dtype(X);
  const auto a = factor_spectrum(A, dtype);
  const auto b = factor_spectrum(B, dtype);

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
