#include "linalg/decompositions/polar.h"

#include "linalg/common/bounded_solution.h"
#include "linalg/common/operand_checks.h"
#include "linalg/common/precision.h"
#include "linalg/decompositions/polar_iteration.h"
#include "linalg/spectral/spectral.h"
#include "linalg/spectral/unit_scale.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace torchium::linalg::detail {
namespace {

void check(const char* op, const at::Tensor& A, std::optional<double> rcond) {
  check_matrices(op, {{"A", A}});
  TORCH_CHECK_VALUE(!rcond || (*rcond > 0 && *rcond < 1), op, ": rcond is ", rcond.value_or(0),
                    "; it must be above 0 and below 1, or None.");
}

at::Tensor by_singular_values(const at::Tensor& X, double rcond) {
  const auto [U, S, Vh] = at::linalg_svd(X, /*full_matrices=*/false);
  const at::Tensor floor = S.narrow(-1, 0, 1) * rcond;
  const at::Tensor weights = (S / floor.clamp_min(smallest_normal(X.scalar_type()))).clamp_max(1);
  return at::matmul(U * weights.unsqueeze(-2), Vh);
}

at::Tensor by_iteration(const at::Tensor& X, double rcond) {
  const at::Tensor Y = X.to(at::kDouble);
  return Y.size(-1) > Y.size(-2) ? polar_iteration(Y.mT().contiguous(), rcond).mT()
                                 : polar_iteration(Y, rcond);
}

// In the precision in which it was computed.
at::Tensor factor_of(const UnitScaled& input, std::optional<double> rcond) {
  const at::Tensor& X = input.matrix;
  const double least = epsilon_of(X.scalar_type());
  const double bound = std::max(rcond.value_or(least), least);
  return input.or_nan(has_polar_iteration(X) ? by_iteration(X, bound)
                                             : by_singular_values(X, bound));
}

at::Tensor rounded(const at::Tensor& U, const at::Tensor& A) {
  return U.to(A.scalar_type()).contiguous().view(A.sizes());
}

std::vector<c10::SymInt> sizes_of_H(const at::Tensor& A) {
  auto sizes = A.sym_sizes().vec();
  sizes[sizes.size() - 2] = A.sym_size(-1);
  return sizes;
}

}  // namespace

at::Tensor orthogonalize_meta(const at::Tensor& A, std::optional<double> rcond) {
  check("orthogonalize", A, rcond);
  return at::empty_symint(A.sym_sizes(), A.options());
}

at::Tensor orthogonalize(const at::Tensor& A, std::optional<double> rcond) {
  check("orthogonalize", A, rcond);
  if (A.numel() == 0) return at::empty(A.sizes(), A.options());
  return rounded(factor_of(unit_scaled(as_batch(A.to(compute_dtype(A)))), rcond), A);
}

std::tuple<at::Tensor, at::Tensor> polar_meta(const at::Tensor& A, std::optional<double> rcond) {
  check("polar", A, rcond);
  return {at::empty_symint(A.sym_sizes(), A.options()),
          at::empty_symint(sizes_of_H(A), A.options())};
}

// H = (U^T A + A^T U) / 2
std::tuple<at::Tensor, at::Tensor> polar(const at::Tensor& A, std::optional<double> rcond) {
  check("polar", A, rcond);
  const std::vector<c10::SymInt> symbolic = sizes_of_H(A);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (A.numel() == 0) {
    return {at::empty(A.sizes(), A.options()), at::zeros(sizes, A.options())};
  }
  const UnitScaled input = unit_scaled(as_batch(A.to(compute_dtype(A))));
  const at::Tensor U = factor_of(input, rcond);
  const at::Tensor half = at::bmm(U.mT(), input.matrix.to(U.scalar_type())).mul_(0.5);
  const at::Tensor H = times_power_of_two((half + half.mT()).to(compute_dtype(A)), input.exponent);
  return {rounded(U, A), saturated(H, A.scalar_type()).view(sizes)};
}

}  // namespace torchium::linalg::detail
