#include "optim/natural_gradient/natural_gradient_step.h"

#include "gradients/jacobian/jacobian.h"
#include "optim/blocked/elementwise.h"
#include "optim/core/argument_checks.h"
#include "optim/core/found_inf_guard.h"
#include "optim/core/step_status.h"
#include "optim/natural_gradient/gradient_rounding.h"
#include "optim/natural_gradient/natural_gradient_direction.h"
#include "optim/natural_gradient/parameter_vectors.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

namespace torchium::optim::detail {
namespace {

using gradients::detail::Jacobian;

// Above this order the factorisation costs more than conjugate gradients.
constexpr int64_t kMaxGramSamples = 4096;

int64_t elements(at::TensorList params) {
  return std::accumulate(params.begin(), params.end(), int64_t{0},
                         [](int64_t sum, const auto& param) { return sum + param.numel(); });
}

// Whether `solver` means a factorisation: "gram", or "auto" with few enough samples.
bool solves_in_sample_space(const std::string& solver, int64_t samples, int64_t elements) {
  return solver == "gram" ||
         (solver == "auto" && samples <= elements && samples <= kMaxGramSamples);
}

bool has_momentum(const NaturalGradientHyperparameters& h) {
  return std::any_of(h.momentums.begin(), h.momentums.end(), [](double mu) { return mu != 0.0; });
}

// L of S = J Lambda^-1 J^T / n + I; NaN where S is not positive definite.
at::Tensor factorize(const Jacobian& J, const std::vector<double>& dampings) {
  std::vector<double> weights;
  for (const double damping : dampings) {
    weights.push_back(1.0 / (damping * static_cast<double>(J.samples())));
  }
  at::Tensor S = J.gram(weights);
  S.diagonal().add_(1.0);
  const auto [L, info] = at::linalg_cholesky_ex(S);
  // cuSOLVER's factor lies in columns; the fake implementation promises rows.
  return at::where(info == 0, L, std::numeric_limits<double>::quiet_NaN()).contiguous();
}

// mu d_prev
ScaledVector momentum_part(const NaturalGradientHyperparameters& h,
                           const NaturalGradientState& state) {
  return has_momentum(h) ? ScaledVector{state.momentum_buffers, h.momentums} : ScaledVector{};
}

// Counts a direction that is not finite like the failure of a root.
void record_failure(const at::Tensor& squares, const FoundInfGuard& guard, at::Tensor& status) {
  const at::Tensor failed = squares.isfinite().logical_not_();
  const at::Tensor any = failed.any();
  const at::Tensor first = at::where(any, failed.to(at::kInt).argmax(), -1);
  at::Tensor count = status.select(0, kConsecutiveRootFailures);
  at::Tensor index = status.select(0, kFailedParameter);
  guard.assign_(count, (count + 1) * any);
  guard.assign_(index, first);
}

// The gradients in the state's dtype.
ParameterVector working_gradients(at::TensorList params, at::TensorList grads,
                                  const FoundInfGuard& guard) {
  ParameterVector result;
  for (size_t p = 0; p < params.size(); ++p) {
    result.push_back(
        signed_gradient(params[p], grads[p], /*maximize=*/false, /*weight_decay=*/0.0, guard));
  }
  return result;
}

// lr, with its sign and the factor that keeps the direction within max_norm.
StepScalar step_size(const StepScalar& lr, bool maximize, const at::Tensor& norm_factor) {
  const double sign = maximize ? -1.0 : 1.0;
  if (lr.device.defined()) {
    return {0.0, lr.device * norm_factor * sign};
  }
  return {lr.host * norm_factor.item<double>() * sign, {}};
}

// d_prev <- d;  p <- p - lr d min(1, max_norm / |d|)  (+ for maximize), if d is finite.
void apply_direction(const NaturalGradientHyperparameters& h, at::TensorList params,
                     const ParameterVector& d, NaturalGradientState& state,
                     const FoundInfGuard& guard) {
  const at::Tensor squares = dots(d, d);
  record_failure(squares, guard, state.status);
  const FoundInfGuard accepted = guard.narrowed(squares.isfinite().all());
  if (accepted.skipped_on_host()) {
    return;
  }
  const at::Tensor norm_factor =
      h.max_norm ? accepted.zero_if_skipped((*h.max_norm / squares.sum().sqrt_()).clamp_max_(1.0))
                 : at::ones({}, squares.options());
  for (size_t p = 0; p < params.size(); ++p) {
    at::Tensor param = params[p];
    const at::Tensor direction = accepted.zero_if_skipped(d[p]);
    if (h.momentums[p] != 0.0) {
      accepted.assign_(state.momentum_buffers[p], direction);
    }
    apply_update({}, step_size(accepted.learning_rate(h.lrs[p]), h.maximize[p], norm_factor), param,
                 direction, nullptr, accepted);
  }
}

}  // namespace

at::Tensor natural_gradient_step(const NaturalGradientHyperparameters& h, at::TensorList params,
                                 at::TensorList grads, NaturalGradientState& state,
                                 const CapturedBatch& batch, at::Tensor& factorization,
                                 bool refreshed, const at::Tensor& found_inf) {
  c10::NoGradGuard no_grad;
  const at::Tensor report = at::zeros({3}, state.status.options().dtype(at::kDouble));
  if (params.empty()) {
    return report;
  }
  const Jacobian J(params, batch.calls, batch.scale, batch.loss_scale);
  const bool by_cg = !solves_in_sample_space(h.solver, J.samples(), elements(params));
  if (!by_cg) {
    factorization = factorization.defined() ? factorization : factorize(J, h.dampings);
  }
  const auto examined =
      examined_gradients(params, grads, state.steps, std::vector<double>(params.size(), 0.0));
  const FoundInfGuard guard = FoundInfGuard::check(examined, state.status, found_inf);
  if (guard.skipped_on_host()) {
    return report;
  }
  guard.advance(state.steps);
  const ParameterVector v = working_gradients(params, grads, guard);
  ParameterVector d;
  if (by_cg) {
    ConjugateGradientsResult solution =
        cg_direction(J, h.dampings, h.eps, v, momentum_part(h, state));
    d = std::move(solution.x);
    report.select(0, 0).fill_(solution.iterations);
    report.select(0, 1).copy_(solution.relative_residual);
    report.select(0, 2).fill_(1);
  } else {
    const GradientSplit split = refreshed
                                    ? split_gradient(J, v, gradient_roundings(grads, batch.calls))
                                    : GradientSplit{at::zeros({}, report.options()), v};
    d = gram_direction(J, h.dampings, split, momentum_part(h, state), factorization);
  }
  apply_direction(h, params, d, state, guard);
  return report;
}

}  // namespace torchium::optim::detail
