#include "linalg/decompositions/cholesky.h"

#include "linalg/common/bounded_solution.h"
#include "linalg/common/operand_checks.h"
#include "linalg/products/symmetric_storage.h"
#include "linalg/spectral/eigh.h"
#include "linalg/spectral/spectral.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

namespace torchium::linalg::detail {
namespace {

// Jitter that is tried after none, in units of the rounding error of an eigenvalue.
constexpr double kJitters[] = {1, 100};

// scale (A + (damping + jitter) I) = L L^T, for [N, n, n]; all but L float64.
struct JitteredFactor {
  at::Tensor L;
  at::Tensor jitter;  // [N]; NaN: every jitter was too small, and L is NaN
  at::Tensor scale;   // [N]
};

// Batches of matrices of which a Cholesky factor is wanted, each with its jitter so far.
class Factorisation {
 public:
  Factorisation(const at::Tensor& A, double damping) : input_(normalize_symmetric(A, damping)) {
    input_.matrix.diagonal(0, -2, -1).add_((input_.scale * damping).unsqueeze(-1));
    const at::ScalarType dtype = A.scalar_type();
    const at::Tensor largest = input_.matrix.abs().amax({-2, -1}).to(at::kDouble);
    unit_ = (largest * eigenvalue_noise(A.size(-1), dtype)).clamp_min_(smallest_normal(dtype));
  }

  // Matrices that break down are tried again: on a CPU these alone. The host does not read what a
  // GPU has found, so that all are factored with every jitter.
  JitteredFactor run() const {
    auto [L, info] = at::linalg_cholesky_ex(input_.matrix);
    at::Tensor jitter = at::zeros_like(unit_);
    at::Tensor failed = info != 0;
    for (const double level : kJitters) {
      if (failed.is_cpu() && !failed.any().item<bool>()) break;
      const at::Tensor added = unit_ * level;
      const auto [next, next_info] = factor(failed, added);
      L = at::where(failed.view({-1, 1, 1}), next, L);
      jitter = at::where(failed, added, jitter);
      failed = failed.logical_and(next_info != 0);
    }
    failed = failed.logical_or(input_.finite.logical_not());
    constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
    return {L.masked_fill(failed.view({-1, 1, 1}), kNaN),
            (jitter / input_.scale).masked_fill_(failed, kNaN), input_.scale};
  }

 private:
  // Of the failed matrices with `added` on the diagonal; on a GPU of all.
  std::tuple<at::Tensor, at::Tensor> factor(const at::Tensor& failed,
                                            const at::Tensor& added) const {
    const auto jittered = [](const at::Tensor& matrices, const at::Tensor& jitter) {
      at::Tensor sum = matrices.clone();
      sum.diagonal(0, -2, -1).add_(jitter.unsqueeze(-1));
      return at::linalg_cholesky_ex(sum);
    };
    if (!failed.is_cpu()) return jittered(input_.matrix, added);
    const at::Tensor which = failed.nonzero().view(-1);
    const auto [L, info] =
        jittered(input_.matrix.index_select(0, which), added.index_select(0, which));
    return {at::zeros_like(input_.matrix).index_copy_(0, which, L),
            at::zeros({failed.size(0)}, info.options()).index_copy_(0, which, info)};
  }

  Normalized input_;
  at::Tensor unit_;  // [N] float64: the rounding error of an eigenvalue
};

void check(const char* op, const at::Tensor& A, double damping) {
  check_matrices(op, {{"A", A}});
  check_square(op, {"A", A});
  check_damping(op, damping, A);
}

JitteredFactor factor_of(const at::Tensor& A, double damping) {
  return Factorisation(as_batch(A.to(compute_dtype(A))), damping).run();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> cholesky_meta(const at::Tensor& A, double damping) {
  check("cholesky", A, damping);
  return {at::empty_symint(A.sym_sizes(), A.options()),
          at::empty_symint(A.sym_sizes().slice(0, A.dim() - 2), A.options().dtype(at::kDouble))};
}

std::tuple<at::Tensor, at::Tensor> cholesky(const at::Tensor& A, double damping) {
  check("cholesky", A, damping);
  const at::IntArrayRef batch = A.sizes().slice(0, A.dim() - 2);
  if (A.numel() == 0) {
    return {at::empty(A.sizes(), A.options()), at::zeros(batch, A.options().dtype(at::kDouble))};
  }
  const JitteredFactor factor = factor_of(A, damping);
  const at::Tensor scale = factor.scale.rsqrt().to(factor.L.scalar_type()).view({-1, 1, 1});
  const at::Tensor L = (factor.L * scale).contiguous();
  return {saturated(L, A.scalar_type()).view(A.sizes()), restore_batch(factor.jitter, batch)};
}

at::Tensor spd_logdet_meta(const at::Tensor& A, double damping) {
  check("spd_logdet", A, damping);
  return at::empty_symint(A.sym_sizes().slice(0, A.dim() - 2), A.options().dtype(compute_dtype(A)));
}

// 2 sum log L_ii - n log scale
at::Tensor spd_logdet(const at::Tensor& A, double damping) {
  check("spd_logdet", A, damping);
  const at::IntArrayRef batch = A.sizes().slice(0, A.dim() - 2);
  const at::ScalarType dtype = compute_dtype(A);
  if (A.numel() == 0) return at::zeros(batch, A.options().dtype(dtype));
  const JitteredFactor factor = factor_of(A, damping);
  const at::Tensor logs = factor.L.diagonal(0, -2, -1).to(at::kDouble).log().sum(-1);
  const at::Tensor sum = 2 * logs - static_cast<double>(A.size(-1)) * factor.scale.log();
  return restore_batch(sum.to(dtype), batch);
}

}  // namespace torchium::linalg::detail
