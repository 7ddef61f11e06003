#include "linalg/roots/newton.h"

#include "linalg/common/precision.h"
#include "linalg/roots/root_schedule_table.h"
#include "linalg/spectral/spectral.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// The lower end of the interval. It and the damping are in units of the upper end.
at::Tensor interval_start(const at::Tensor& damping, const NewtonLimits& limits) {
  return at::maximum(damping, (limits.noise - damping).mul_(NewtonLimits::kNoiseMargin))
      .clamp_min_(limits.lowest_start);
}

// An upper bound of the largest eigenvalue magnitude, [N] float64.
at::Tensor spectral_bound(const at::Tensor& S, double unit) {
  const at::Tensor magnitudes = S.abs();
  const at::Tensor row_sum = magnitudes.sum(-1).amax(-1);
  const at::Tensor frobenius = magnitudes.square_().sum({-2, -1}).sqrt_();
  const double rounding = 2 * unit * static_cast<double>(S.size(-1));
  return at::minimum(row_sum, frobenius).to(at::kDouble).mul_(1 + rounding);
}

// The matrices of one schedule and the buffers of their iteration. All are polynomials of one
// matrix, but a product computed by triangles and mirrored is off by the commutator of its factors:
// it made the residual up to a hundred times larger (float32, p = 1 and 2, condition 1e5), at the
// same relative error. So products are full and the result is symmetrised once.
class CoupledIteration {
 public:
  explicit CoupledIteration(at::Tensor M)
      : M_(std::move(M)), q_(at::empty_like(M_)), spare_(at::empty_like(M_)) {}

  // The same steps for all matrices.
  at::Tensor run(const std::vector<MinimaxStep>& steps, int64_t p) {
    return run(steps.size(), p, [&](size_t k) {
      q_.mul_(steps[k].c).add_(M_, steps[k].b);
      q_.diagonal(0, -2, -1).add_(steps[k].a);
    });
  }

  // The steps of each matrix: coefficients [steps, N, 3] in the dtype of M.
  at::Tensor run(const at::Tensor& steps, int64_t p) {
    return run(steps.size(0), p, [&](size_t k) {
      const auto coefficients = steps[k].unbind(-1);
      q_.mul_(coefficients[2].view({-1, 1, 1})).addcmul_(M_, coefficients[1].view({-1, 1, 1}));
      q_.diagonal(0, -2, -1).add_(coefficients[0].unsqueeze(-1));
    });
  }

 private:
  // polynomial(k): q <- a I + b M + c q for step k, where q is M^2.
  template <typename Polynomial>
  at::Tensor run(size_t steps, int64_t p, const Polynomial& polynomial) {
    for (size_t k = 0; k < steps; ++k) {
      at::bmm_out(q_, M_, M_);
      polynomial(k);
      if (k == 0) {
        X_ = q_.clone();
      } else {
        multiply(X_, q_);
      }
      if (k + 1 < steps) {
        multiply_by_power(p);
      }
    }
    return X_.add_(X_.mT().clone()).mul_(0.5);
  }

  // A <- A B
  void multiply(at::Tensor& A, const at::Tensor& B) {
    at::bmm_out(spare_, A, B);
    std::swap(A, spare_);
  }

  // M <- M q^p by repeated squaring of q, which is overwritten.
  void multiply_by_power(int64_t p) {
    for (;; p /= 2) {
      if (p % 2 == 1) {
        multiply(M_, q_);
      }
      if (p == 1) {
        return;
      }
      multiply(q_, q_);
    }
  }

  at::Tensor M_, X_, q_, spare_;
};

// The root by the schedules of the levels, which the host reads.
std::pair<at::Tensor, at::Tensor> iterate_by_host(const at::Tensor& M, const at::Tensor& levels,
                                                  int64_t p, double unit) {
  const at::Tensor on_host = levels.cpu();
  std::map<int64_t, std::vector<int64_t>> groups;
  for (int64_t i = 0; i < M.size(0); ++i) {
    groups[on_host.const_data_ptr<int64_t>()[i]].push_back(i);
  }
  at::Tensor root = groups.size() > 1 ? at::empty_like(M) : at::Tensor();
  at::Tensor iterations = at::empty({M.size(0)}, on_host.options());
  for (const auto& [level, members] : groups) {
    const auto schedule = minimax_schedule(p, std::exp2(level), unit);
    const at::Tensor index = at::tensor(members, at::kLong);
    iterations.index_fill_(0, index, static_cast<int64_t>(schedule->size()));
    if (groups.size() == 1) {
      root = CoupledIteration(M).run(*schedule, p);
    } else {
      const at::Tensor on_device = index.to(M.device());
      root.index_copy_(0, on_device,
                       CoupledIteration(M.index_select(0, on_device)).run(*schedule, p));
    }
  }
  return {root, iterations.to(M.device())};
}

// The same without a host read: every matrix takes the steps of the longest schedule; steps beyond
// its own schedule are the identity.
std::pair<at::Tensor, at::Tensor> iterate_by_device(const at::Tensor& M, const at::Tensor& levels,
                                                    int64_t lowest_level, int64_t p, double unit) {
  const auto [coefficients, iterations] = schedules_of_levels(levels, lowest_level, p, unit);
  return {CoupledIteration(M).run(coefficients.to(M.scalar_type()), p), iterations};
}

}  // namespace

NewtonLimits newton_limits(int64_t n, at::ScalarType dtype) {
  const bool is_float = dtype == at::kFloat;
  const double u = epsilon_of(dtype);
  const double smallest =
      is_float ? std::numeric_limits<float>::min() : std::numeric_limits<double>::min();
  // Measured noise: 0.2 u for statistics of rank one, 5 u for Q D Q^T.
  const double noise = 3 * u * std::max(1.0, std::sqrt(static_cast<double>(n)) / 32);
  // Errors of the smallest eigenvalues, and of medium ones (minimax.cpp), grow with the inverse of
  // the lower end. A small matrix averages fewer of them.
  const double lowest_start = n <= 128 ? 16 * u : std::max(8 * u, noise);
  // The iteration overshoots on null eigenvalues, by a factor of at most 60 (p = 1): the result
  // must not overflow.
  return {u / 2, noise, lowest_start, 64 * smallest};
}

int64_t NewtonLimits::lowest_level() const {
  return static_cast<int64_t>(std::floor(std::log2(lowest_start)));
}

NewtonRoot newton_inverse_root(const Normalized& input, int64_t p, double eps,
                               double relative_eps) {
  const at::NoTF32Guard full_precision;  // TF32 diverges below l = 1e-3
  const at::Tensor& S = input.matrix;
  const at::ScalarType dtype = S.scalar_type();
  const NewtonLimits limits = newton_limits(S.size(-1), dtype);
  const double unit = limits.unit_roundoff;

  const at::Tensor bound = spectral_bound(S, unit);
  const at::Tensor damping = input.scale * eps + relative_eps * bound;
  const at::Tensor top = at::maximum(
      (bound + damping).mul_(1 + 2 * unit),
      input.scale * (limits.smallest_floor / (NewtonLimits::kNoiseMargin * limits.noise)));
  // Lower ends of the interval are powers of two, so there are few schedules.
  const at::Tensor levels = interval_start(damping / top, limits).log2_().floor_().to(at::kLong);

  at::Tensor M = S / top.to(dtype).view({-1, 1, 1});
  M.diagonal(0, -2, -1).add_((damping / top).to(dtype).unsqueeze(-1));
  auto [root, iterations] = S.is_cuda()
                                ? iterate_by_device(M, levels, limits.lowest_level(), p, unit)
                                : iterate_by_host(M, levels, p, unit);
  const double largest =
      dtype == at::kFloat ? std::numeric_limits<float>::max() : std::numeric_limits<double>::max();
  root.mul_(power_(top / input.scale, -1.0 / static_cast<double>(p)).to(dtype).view({-1, 1, 1}))
      .clamp_(-largest, largest);
  return {root, damping, iterations, top * at::exp2(levels.to(at::kDouble)), top};
}

}  // namespace torchium::linalg::detail
