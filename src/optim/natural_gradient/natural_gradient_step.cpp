#include "optim/natural_gradient/natural_gradient_step.h"

#include "optim/blocked/elementwise.h"
#include "optim/core/argument_checks.h"
#include "optim/core/found_inf_guard.h"
#include "optim/core/step_status.h"
#include "optim/natural_gradient/gradient_rounding.h"
#include "optim/natural_gradient/natural_gradient_direction.h"
#include "optim/natural_gradient/nystrom.h"
#include "optim/natural_gradient/parameter_segments.h"
#include "optim/natural_gradient/parameter_space.h"
#include "optim/natural_gradient/parameter_vectors.h"
#include "optim/natural_gradient/sharing/shared_jacobian.h"
#include "support/phase.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace torchium::optim::detail {
namespace {

int64_t elements(at::TensorList params) {
  return std::accumulate(params.begin(), params.end(), int64_t{0},
                         [](int64_t sum, const auto& param) { return sum + param.numel(); });
}

bool has_momentum(const NaturalGradientHyperparameters& h) {
  return std::any_of(h.momentums.begin(), h.momentums.end(), [](double mu) { return mu != 0.0; });
}

// L of J Lambda^-1 J^T / n + I.
at::Tensor gram_factor(const SharedJacobian& J, const NaturalGradientHyperparameters& h) {
  std::vector<double> weights;
  for (const double damping : h.dampings) {
    weights.push_back(1.0 / (damping * static_cast<double>(J.samples())));
  }
  at::Tensor S = J.gram(weights, h.max_workspace_bytes);
  S.diagonal().add_(1.0);
  return checked_cholesky(S);
}

// mu d_prev
ScaledVector momentum_part(const NaturalGradientHyperparameters& h,
                           const ParameterSegments& segments, const NaturalGradientState& state) {
  return has_momentum(h)
             ? ScaledVector{segments.join(state.momentum_buffers), segments.common(h.momentums)}
             : ScaledVector{};
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

int64_t consecutive_skips(const at::Tensor& status) {
  return status.const_data_ptr<int64_t>()[kConsecutiveSkips];
}

// On a CPU all ranks skip if one does, and count and report it if its gradients are unfit. `skips`:
// in a row before this step.
bool all_skip_on_host(const SharedJacobian& J, bool skips_alone, int64_t skips,
                      at::Tensor& status) {
  if (!status.is_cpu()) {
    return skips_alone;
  }
  auto* entries = status.mutable_data_ptr<int64_t>();
  constexpr int64_t kNone = -2;  // less than -1: skips without an unfit gradient
  const int64_t unfit = J.most(skips_alone ? entries[kNonFiniteParameter] : kNone);
  if (unfit >= 0) {
    entries[kNonFiniteParameter] = unfit;
    entries[kConsecutiveSkips] = skips + 1;
    entries[kTotalSkips] += skips_alone ? 0 : 1;
  }
  return unfit > kNone;
}

// The gradients in the state's dtype.
ParameterVector working_gradients(const ParameterSegments& segments, at::TensorList params,
                                  at::TensorList grads, const FoundInfGuard& guard) {
  ParameterVector result = segments.join(grads);
  for (size_t s = 0; s < result.size(); ++s) {
    const at::Tensor& param = params[segments.members()[s].front()];
    result[s] = signed_gradient(param, result[s], /*maximize=*/false, /*weight_decay=*/0.0, guard);
  }
  return result;
}

// |d_p|^2 of every parameter p: float64 [parameters].
at::Tensor squares_of_params(const std::vector<at::Tensor>& d) {
  const auto dtype = d[0].scalar_type();
  const bool can_join = std::ranges::all_of(
      d, [&](const at::Tensor& x) { return !x.is_cpu() && x.scalar_type() == dtype; });
  return can_join ? at::stack(at::_foreach_norm(d)).to(at::kDouble).square_() : dots(d, d);
}

// lr, with its sign and the factor that keeps the direction within max_norm.
StepScalar step_size(const StepScalar& lr, bool maximize, const at::Tensor& norm_factor) {
  const double sign = maximize ? -1.0 : 1.0;
  if (lr.device.defined()) {
    return {0.0, lr.device * norm_factor * sign};
  }
  return {lr.host * norm_factor.item<double>() * sign, {}};
}

// By conjugate gradients, with a preconditioner if one is wanted, which W keeps. Also returns how
// they ended.
ConjugateGradientsResult preconditioned_direction(const NaturalGradientHyperparameters& h,
                                                  const SegmentedJacobian& J,
                                                  const std::vector<double>& dampings,
                                                  const ConjugateGradientsRule& rule,
                                                  const ParameterVector& v,
                                                  const ScaledVector& previous, at::Tensor& W) {
  if (h.nystrom_rank > 0 && !W.defined()) {
    const int64_t rank = std::min({h.nystrom_rank, J.samples(), J.segments.elements()});
    W = nystrom_factor(J, dampings, v, rank);
    J.equalize_({W});
  }
  return cg_direction(J, dampings, W, rule, v, previous);
}

// p <- p - lr d for the parameters of one segment.
void subtract(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& d,
              const StepScalar& lr, const FoundInfGuard& guard) {
  for (size_t k = 0; k < params.size(); ++k) {
    at::Tensor param = params[k];
    apply_update({}, lr, param, d[k], nullptr, guard);
  }
}

// The same on a GPU, in a few launches.
void subtract_at_once(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& lr_d) {
  const double most = largest_number(params[0].scalar_type());
  at::_foreach_sub_(params, lr_d);
  at::_foreach_clamp_max_(params, most);
  at::_foreach_clamp_min_(params, -most);
}

// d_prev <- d;  p <- p - lr d min(1, max_norm / |d|)  (+ for maximize), if d is finite.
// previous: d_prev. Returns the factor of max_norm; undefined: nothing has moved.
at::Tensor apply_direction(const NaturalGradientHyperparameters& h,
                           const ParameterSegments& segments, at::TensorList params,
                           const ParameterVector& d, const ParameterVector& previous,
                           NaturalGradientState& state, const FoundInfGuard& guard) {
  const torchium::detail::Phase phase("torchium::elementwise");
  const at::Tensor squares = squares_of_params(segments.split(d));
  record_failure(squares, guard, state.status);
  const FoundInfGuard accepted = guard.narrowed(squares.isfinite().all());
  if (accepted.skipped_on_host()) {
    return {};
  }
  const at::Tensor norm_factor =
      h.max_norm ? accepted.zero_if_skipped((*h.max_norm / squares.sum().sqrt_()).clamp_max_(1.0))
                 : at::ones({}, squares.options());
  for (size_t s = 0; s < d.size(); ++s) {
    const auto& members = segments.members()[s];
    const size_t first = members.front();
    const auto of_segment = [&](at::TensorList all) {
      std::vector<at::Tensor> result;
      for (const size_t p : members) {
        result.push_back(all[p]);
      }
      return result;
    };
    if (h.momentums[first] != 0.0) {
      const at::Tensor kept =
          accepted.keep().defined() ? at::where(accepted.keep(), d[s], previous[s]) : d[s];
      at::_foreach_copy_(of_segment(state.momentum_buffers), segments.split(kept, s));
    }
    const at::Tensor direction = accepted.zero_if_skipped(d[s]);
    const StepScalar lr =
        step_size(accepted.learning_rate(h.lrs[first]), h.maximize[first], norm_factor);
    if (members.size() > 1 && !direction.is_cpu()) {
      subtract_at_once(of_segment(params),
                       segments.split(lr.multiply(finite_entries(direction)), s));
    } else {
      subtract(of_segment(params), segments.split(direction, s), lr, accepted);
    }
  }
  return norm_factor;
}

}  // namespace

// "auto": the smaller of both systems, if its matrix and factor fit into the workspace.
Solver chosen_solver(const std::string& option, double eps, int64_t max_workspace_bytes,
                     at::TensorList params, int64_t rows) {
  const int64_t columns = elements(params);
  const int64_t order = std::min(rows, columns);
  const bool fits = order <= max_workspace_bytes / 16 / std::max<int64_t>(order, 1);
  const std::string best = !fits ? "cg" : rows <= columns ? "gram" : "explicit";
  return {option == "auto" ? best : option, conjugate_gradients_rule(params, rows, eps)};
}

// Of all layers, within a step.
constexpr int64_t kKeptPatchBytes = int64_t{1} << 29;

at::Tensor natural_gradient_step(const NaturalGradientHyperparameters& h, const Solver& solver,
                                 at::TensorList params, at::TensorList grads,
                                 NaturalGradientState& state, const CapturedBatch& batch,
                                 at::Tensor& factorization, const at::Tensor& found_inf) {
  c10::NoGradGuard no_grad;
  at::Tensor numbers = at::zeros({4}, state.status.options().dtype(at::kDouble));
  if (params.empty()) {
    return numbers;
  }
  SharedJacobian J(params, batch);
  if (solver.name != "explicit") {
    J.keep_patches(kKeptPatchBytes);
  }
  if (solver.name != "cg" && !factorization.defined()) {
    const torchium::detail::Phase phase("torchium::gram");
    factorization =
        solver.name == "gram" ? gram_factor(J, h) : explicit_factor(params, batch, J.samples(), h);
  }
  const auto examined =
      examined_gradients(params, grads, state.steps, std::vector<double>(params.size(), 0.0));
  const int64_t skips = state.status.is_cpu() ? consecutive_skips(state.status) : 0;
  const FoundInfGuard guard = FoundInfGuard::check(examined, state.status, found_inf);
  if (all_skip_on_host(J, guard.skipped_on_host(), skips, state.status)) {
    return numbers;
  }
  guard.advance(state.steps);
  const std::vector<double> roundings = gradient_roundings(grads, batch.calls);
  const ParameterSegments segments(params, h, roundings);
  const SegmentedJacobian segmented{J, segments};
  const ParameterVector v = working_gradients(segments, params, grads, guard);
  const auto dampings = segments.common(h.dampings);
  const ScaledVector previous = momentum_part(h, segments, state);  // mu d_prev
  ParameterVector d;
  {
    const torchium::detail::Phase phase("torchium::precondition");
    if (solver.name == "cg") {
      ConjugateGradientsResult solution =
          preconditioned_direction(h, segmented, dampings, solver.rule, v, previous, factorization);
      d = std::move(solution.x);
      numbers.select(0, 0).copy_(solution.iterations);
      numbers.select(0, 1).copy_(solution.relative_residual);
      J.equalize_(d);
    } else if (solver.name == "explicit") {
      d = explicit_direction(segments, dampings, v, previous, factorization);
      J.equalize_(d);
    } else {
      const at::Tensor a = batch.coefficients(J.samples(), v[0].options());
      const GradientSplit split = a.defined()
                                      ? split_gradient(segmented, v, a, segments.common(roundings))
                                      : GradientSplit{{}, v};
      d = gram_direction(segmented, dampings, split, previous, factorization);
    }
  }
  const at::Tensor norm_factor = apply_direction(h, segments, params, d, previous.x, state, guard);
  if (h.adaptive_damping && norm_factor.defined()) {
    numbers.select(0, 2).copy_(dot(v, d));
    numbers.select(0, 3).copy_(norm_factor);
  }
  return numbers;
}

}  // namespace torchium::optim::detail
