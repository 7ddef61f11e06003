#include "linalg/decompositions/svd.h"

#include "linalg/common/bounded_solution.h"
#include "linalg/common/operand_checks.h"
#include "linalg/common/precision.h"
#include "linalg/common/random_signs.h"
#include "linalg/decompositions/polar_iteration.h"
#include "linalg/spectral/eigh.h"
#include "linalg/spectral/spectral.h"
#include "linalg/spectral/unit_scale.h"

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

namespace torchium::linalg::detail {
namespace {

using Svd = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The polar iteration makes singular values above this times the largest one. Those that random
// signs add to a singular matrix (see shifted) are larger.
constexpr double kSmallestSingular = 1e-13;

// X plus random signs of a spectral norm of about a quarter of float32's epsilon, so that no
// singular value is zero, and the polar factor has orthonormal columns. [N, m, n] float64, with a
// largest entry of at least 1/2.
at::Tensor shifted(const at::Tensor& X) {
  const double size = epsilon_of(at::kFloat) / 8 / std::sqrt(static_cast<double>(X.size(-2)));
  const at::Tensor signs = random_signs(X.size(-2), X.size(-1), /*seed=*/0, 0, X.options());
  return at::add(X, signs, size);
}

// X = U H by the polar factor U, and H = V S V^T: X = (U V) S V^T (Higham and Papadimitriou 1994).
// m >= n.
Svd svd_of_tall(const at::Tensor& X) {
  const at::NoTF32Guard full_precision;
  const at::Tensor exact = X.to(at::kDouble);
  const at::Tensor U = polar_iteration(shifted(exact), kSmallestSingular);
  const at::Tensor half = at::bmm(U.mT(), exact).mul_(0.5);
  const at::Tensor H = (half + half.mT()).to(at::kFloat).contiguous();
  const auto [values, vectors] = symmetric_eigensystem(H);  // ascending
  const at::Tensor V = vectors.flip(-1);
  return {at::bmm(U.to(at::kFloat), V), values.flip(-1).clamp_min_(0), V.mT()};
}

struct Sizes {
  std::vector<c10::SymInt> U, S, Vh;
};

Sizes sizes_of(const at::Tensor& A) {
  check_matrices("svd", {{"A", A}});
  const c10::SymInt m = A.sym_size(-2), n = A.sym_size(-1), k = m.min(n);
  const auto batch = A.sym_sizes().slice(0, A.dim() - 2).vec();
  Sizes sizes{batch, batch, batch};
  sizes.U.insert(sizes.U.end(), {m, k});
  sizes.S.push_back(k);
  sizes.Vh.insert(sizes.Vh.end(), {k, n});
  return sizes;
}

}  // namespace

Svd svd_by_polar(const at::Tensor& X) {
  if (X.size(-2) >= X.size(-1)) return svd_of_tall(X);
  const auto [U, S, Vh] = svd_of_tall(X.mT());
  return {Vh.mT(), S, U.mT()};
}

Svd svd_meta(const at::Tensor& A) {
  const Sizes sizes = sizes_of(A);
  return {at::empty_symint(sizes.U, A.options()), at::empty_symint(sizes.S, A.options()),
          at::empty_symint(sizes.Vh, A.options())};
}

Svd svd(const at::Tensor& A) {
  if (A.numel() == 0) return svd_meta(A);
  const Sizes sizes = sizes_of(A);
  const UnitScaled input = unit_scaled(as_batch(A.to(compute_dtype(A))));
  const auto [U, S, Vh] = has_polar_iteration(A)
                              ? svd_by_polar(input.matrix)
                              : at::linalg_svd(input.matrix, /*full_matrices=*/false);
  const auto result = [&](const at::Tensor& X, const std::vector<c10::SymInt>& to) {
    return input.or_nan(X).to(A.scalar_type()).contiguous().view(C10_AS_INTARRAYREF_SLOW(to));
  };
  const at::Tensor values = times_power_of_two(S.unsqueeze(-2), input.exponent);
  return {result(U, sizes.U), result(saturated(values, A.scalar_type()), sizes.S),
          result(Vh, sizes.Vh)};
}

}  // namespace torchium::linalg::detail
