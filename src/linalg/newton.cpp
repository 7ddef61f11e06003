#include "linalg/newton.h"

#include "linalg/eigh.h"
#include "linalg/minimax.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <cmath>
#include <limits>
#include <map>
#include <utility>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// The interval starts this much above the rounding noise of the eigenvalues: the iteration diverges
// on negative eigenvalues of the size of the interval's lower end, and grows by a factor of three
// at a quarter of it.
constexpr double kNoiseMargin = 8.0;

double unit_roundoff(at::ScalarType dtype) {
  return dtype == at::kFloat ? std::numeric_limits<float>::epsilon() / 2
                             : std::numeric_limits<double>::epsilon() / 2;
}

// Below it even a null matrix is answered as if it were it. The iteration overshoots on null
// eigenvalues, by a factor of 53 at most (p = 1); the result must not overflow.
double smallest_floor(at::ScalarType dtype) {
  return 64 * (dtype == at::kFloat ? std::numeric_limits<float>::min()
                                   : std::numeric_limits<double>::min());
}

// An upper bound of the largest eigenvalue magnitude, [N] float64.
at::Tensor spectral_bound(const at::Tensor& S) {
  const at::Tensor magnitudes = S.abs();
  const at::Tensor row_sum = magnitudes.sum(-1).amax(-1);
  const at::Tensor frobenius = magnitudes.square_().sum({-2, -1}).sqrt_();
  const double rounding = 2 * unit_roundoff(S.scalar_type()) * static_cast<double>(S.size(-1));
  return at::minimum(row_sum, frobenius).to(at::kDouble).mul_(1 + rounding);
}

// The matrices of one schedule and the buffers of their iteration. All of them are polynomials of
// one matrix, but a product that is computed by half and mirrored is off by the commutator of its
// factors: it made the residual up to a hundred times larger (float32, p = 1 and 2, condition 1e5),
// at the same relative error. So products are full and the result is symmetrised once.
class CoupledIteration {
 public:
  explicit CoupledIteration(at::Tensor M)
      : M_(std::move(M)), q_(at::empty_like(M_)), spare_(at::empty_like(M_)) {}

  at::Tensor run(const std::vector<MinimaxStep>& steps, int64_t p) {
    for (size_t k = 0; k < steps.size(); ++k) {
      evaluate(steps[k]);
      if (k == 0) {
        X_ = q_.clone();
      } else {
        multiply(X_, q_);
      }
      if (k + 1 < steps.size()) {
        multiply_by_power(p);
      }
    }
    return X_.add_(X_.mT().clone()).mul_(0.5);
  }

 private:
  // q <- a I + b M + c M^2
  void evaluate(const MinimaxStep& step) {
    at::bmm_out(q_, M_, M_);
    q_.mul_(step.c).add_(M_, step.b);
    q_.diagonal(0, -2, -1).add_(step.a);
  }

  // A <- A B
  void multiply(at::Tensor& A, const at::Tensor& B) {
    at::bmm_out(spare_, A, B);
    std::swap(A, spare_);
  }

  // M <- M q^p by repeated squaring of q, which is lost.
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

}  // namespace

NewtonRoot newton_inverse_root(const Normalized& input, int64_t p, double eps,
                               double relative_eps) {
  const at::NoTF32Guard full_precision;  // TF32 diverges below l = 1e-3
  const at::Tensor& S = input.matrix;
  const at::ScalarType dtype = S.scalar_type();
  const int64_t matrices = S.size(0);
  const double unit = unit_roundoff(dtype);
  const double relative_floor = kNoiseMargin * eigenvalue_noise(S.size(-1), dtype);

  const at::Tensor bound = spectral_bound(S);
  const at::Tensor damping = input.scale * eps + relative_eps * bound;
  const at::Tensor top = at::maximum((bound + damping).mul_(1 + 2 * unit),
                                     input.scale * (smallest_floor(dtype) / relative_floor));
  // Lower ends of the interval are powers of two, so that few schedules are ever made.
  const at::Tensor rungs =
      (damping / top).clamp_min_(relative_floor).log2_().floor_().to(at::kLong).cpu();
  std::map<int64_t, std::vector<int64_t>> groups;
  for (int64_t i = 0; i < matrices; ++i) {
    groups[rungs.const_data_ptr<int64_t>()[i]].push_back(i);
  }

  at::Tensor M = S / top.to(dtype).view({-1, 1, 1});
  M.diagonal(0, -2, -1).add_((damping / top).to(dtype).unsqueeze(-1));
  at::Tensor root = groups.size() > 1 ? at::empty_like(S) : at::Tensor();
  at::Tensor iterations = at::empty({matrices}, rungs.options());
  for (const auto& [rung, members] : groups) {
    const auto schedule = minimax_schedule(p, std::exp2(rung), unit);
    const at::Tensor index = at::tensor(members, at::kLong);
    iterations.index_fill_(0, index, static_cast<int64_t>(schedule->size()));
    if (groups.size() == 1) {
      root = CoupledIteration(M).run(*schedule, p);
    } else {
      const at::Tensor on_device = index.to(S.device());
      root.index_copy_(0, on_device,
                       CoupledIteration(M.index_select(0, on_device)).run(*schedule, p));
    }
  }
  root.mul_((top / input.scale).pow_(-1.0 / static_cast<double>(p)).to(dtype).view({-1, 1, 1}));
  return {root, damping, iterations.to(S.device()),
          top * at::exp2(rungs.to(S.device(), at::kDouble))};
}

}  // namespace torchium::linalg::detail
