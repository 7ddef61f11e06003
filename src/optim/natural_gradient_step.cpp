#include "optim/natural_gradient_step.h"

#include "gradients/jacobian.h"
#include "linalg/operand_checks.h"
#include "optim/elementwise.h"
#include "optim/gradient_rounding.h"
#include "optim/natural_gradient_direction.h"
#include "optim/parameter_vectors.h"
#include "optim/step_gate.h"
#include "optim/step_inputs.h"
#include "optim/step_status.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

namespace torchium::optim::detail {
namespace {

using gradients::detail::Jacobian;

// Above this order the factorisation costs more than conjugate gradients.
constexpr int64_t kMaxGramSamples = 4096;
// Directions with larger entries are looked at before they are applied.
constexpr double kLargestSafeEntry = 1e30;

void check_solver(const std::string& solver) {
  TORCH_CHECK_VALUE(solver == "auto" || solver == "gram" || solver == "cg", "solver is '", solver,
                    "'; it must be 'auto', 'gram' or 'cg'");
}

void check_dampings(const std::vector<double>& dampings, size_t params) {
  TORCH_CHECK_VALUE(dampings.size() == params, "dampings has ", dampings.size(), " entries for ",
                    params, " params; pass one each");
  for (const double damping : dampings) {
    TORCH_CHECK_VALUE(damping > 0 && std::isfinite(damping), "damping is ", damping,
                      "; it must be a finite number > 0");
  }
}

bool uses_conjugate_gradients(const at::Tensor& factorization) {
  return !factorization.defined() || factorization.numel() == 0;
}

bool has_momentum(const NaturalGradientHyperparameters& h) {
  return std::any_of(h.momentums.begin(), h.momentums.end(), [](double mu) { return mu != 0.0; });
}

void check_arguments(const NaturalGradientHyperparameters& h, at::TensorList params,
                     at::TensorList grads, const NaturalGradientState& state,
                     const at::Tensor& factorization) {
  check_step_arguments(params, grads, state.steps, state.status, {}, /*schedule_on_host=*/false);
  check_dampings(h.dampings, params.size());
  check_solver(h.solver);
  TORCH_CHECK_VALUE(h.lrs.size() == params.size() && h.momentums.size() == params.size() &&
                        h.maximize.size() == params.size(),
                    "lrs, momentums and maximize have ", h.lrs.size(), ", ", h.momentums.size(),
                    " and ", h.maximize.size(), " entries for ", params.size(),
                    " params; pass one each");
  for (const double momentum : h.momentums) {
    TORCH_CHECK_VALUE(momentum >= 0 && momentum < 1, "momentum is ", momentum,
                      "; it must be in [0, 1)");
  }
  check_state_list(state.momentum_buffers, params, has_momentum(h), "momentum_buffers");
  TORCH_CHECK_VALUE(h.eps > 0 && std::isfinite(h.eps), "eps is ", h.eps,
                    "; it must be a finite number > 0");
  TORCH_CHECK_VALUE(!h.max_norm || *h.max_norm > 0, "max_norm is ", h.max_norm.value_or(0.0),
                    "; it must be positive, or None");
  TORCH_CHECK_VALUE(h.solver != "gram" || !uses_conjugate_gradients(factorization),
                    "solver 'gram' needs a factorization; call natural_gradient_factorize first");
}

void check_factorization(const at::Tensor& factorization, const Jacobian& J) {
  TORCH_CHECK_VALUE(uses_conjugate_gradients(factorization) ||
                        (factorization.sizes() == at::IntArrayRef({J.samples(), J.samples()}) &&
                         factorization.scalar_type() == at::kDouble),
                    "factorization is ", factorization.toString(), factorization.sizes(),
                    " but the uses hold ", J.samples(),
                    " samples; pass that of natural_gradient_factorize for the same uses");
}

// mu d_prev
ScaledVector momentum_part(const NaturalGradientHyperparameters& h,
                           const NaturalGradientState& state) {
  return has_momentum(h) ? ScaledVector{state.momentum_buffers, h.momentums} : ScaledVector{};
}

// Counts a direction that is not finite like the failure of a root.
void record_failure(const at::Tensor& squares, const StepGate& gate, at::Tensor& status) {
  const at::Tensor failed = squares.isfinite().logical_not_();
  const at::Tensor any = failed.any();
  const at::Tensor first = at::where(any, failed.to(at::kInt).argmax(), -1);
  at::Tensor count = status.select(0, kConsecutiveRootFailures);
  at::Tensor index = status.select(0, kFailedParameter);
  gate.assign_(count, (count + 1) * any);
  gate.assign_(index, first);
}

// The gradients in the state's dtype.
ParameterVector working_gradients(at::TensorList params, at::TensorList grads,
                                  const StepGate& gate) {
  ParameterVector result;
  for (size_t p = 0; p < params.size(); ++p) {
    result.push_back(
        signed_gradient(params[p], grads[p], /*maximize=*/false, /*weight_decay=*/0.0, gate));
  }
  return result;
}

// Examines the gradients, or first their images, which are smaller: that of a gradient which is not
// finite is not finite either, and that of one which is far too large is large too.
StepGate check_gradients(at::TensorList params, at::TensorList grads, NaturalGradientState& state,
                         const std::optional<Jacobian::Sketch>& images,
                         const at::Tensor& found_inf) {
  const std::vector<double> no_decay(params.size(), 0.0);
  const auto examined = examined_gradients(params, grads, state.steps, no_decay);
  if (images) {
    auto of_images = examined;
    for (size_t p = 0; p < params.size(); ++p) {
      of_images[p].tensor = images->of_x[p];
    }
    if (all_fit_on_cpu(of_images)) {
      return StepGate::check({}, state.status, found_inf);
    }
  }
  return StepGate::check(examined, state.status, found_inf);
}

// Whether p <- p - lr d needs no d: the update can be added to the parameters as it is computed,
// which saves most of the memory that a step goes through. The host must know before that d is
// finite, and no use may look at a parameter.
bool can_add_directly(const NaturalGradientHyperparameters& h, at::TensorList params,
                      const CapturedBatch& batch, const SampleSpaceSolution& solution,
                      const at::Tensor& L) {
  if (!L.is_cpu() || has_momentum(h) || h.max_norm || !solution.x.x.empty()) {
    return false;
  }
  for (const auto& param : params) {
    if (!param.is_contiguous() || param.scalar_type() != linalg::detail::compute_dtype(param) ||
        std::any_of(batch.uses.begin(), batch.uses.end(), [&](const auto& use) {
          return use.input.is_alias_of(param) || use.output_gradient.is_alias_of(param);
        })) {
      return false;
    }
  }
  // Far below the largest number of the dtype: products with parts of the rows must be finite too.
  return largest_entry(solution.w, L, h.dampings).item<double>() < kLargestSafeEntry;
}

// p <- p - lr Lambda^-1 J^T w  (+ for maximize), on the CPU.
void add_directly(const NaturalGradientHyperparameters& h, at::TensorList params, const Jacobian& J,
                  const at::Tensor& w, at::Tensor& status) {
  std::vector<double> scales;
  for (size_t p = 0; p < params.size(); ++p) {
    scales.push_back((h.maximize[p] ? 1.0 : -1.0) * h.lrs[p].item<double>() / h.dampings[p]);
  }
  status.select(0, kConsecutiveRootFailures).zero_();
  status.select(0, kFailedParameter).fill_(-1);
  J.add_transpose_product_(params, w, scales);
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
                     const ParameterVector& d, NaturalGradientState& state, const StepGate& gate) {
  const at::Tensor squares = dots(d, d);
  record_failure(squares, gate, state.status);
  const StepGate accepted = gate.narrowed(squares.isfinite().all());
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

bool solves_in_sample_space(const std::string& solver, const c10::SymInt& samples,
                            const c10::SymInt& elements) {
  check_solver(solver);
  return solver == "gram" ||
         (solver == "auto" && samples <= elements && samples <= kMaxGramSamples);
}

at::Tensor natural_gradient_factorize(at::TensorList params, const CapturedBatch& batch,
                                      const std::vector<double>& dampings,
                                      const std::string& solver) {
  c10::NoGradGuard no_grad;
  check_dampings(dampings, params.size());
  const Jacobian J(params, batch.uses, batch.scale, batch.loss_scale);
  const int64_t n = J.samples();
  int64_t size = 0;
  std::vector<double> weights;
  for (size_t p = 0; p < params.size(); ++p) {
    size += params[p].numel();
    weights.push_back(1.0 / (dampings[p] * static_cast<double>(n)));
  }
  if (!solves_in_sample_space(solver, n, size)) {
    return at::empty({0, 0}, batch.uses[0].output_gradient.options().dtype(at::kDouble));
  }
  at::Tensor S = J.gram(weights);
  S.diagonal().add_(1.0);
  const auto [L, info] = at::linalg_cholesky_ex(S);
  // cuSOLVER's factor lies in columns; the fake implementation promises rows.
  return at::where(info == 0, L, std::numeric_limits<double>::quiet_NaN()).contiguous();
}

at::Tensor natural_gradient_step(const NaturalGradientHyperparameters& h, at::TensorList params,
                                 at::TensorList grads, NaturalGradientState& state,
                                 const CapturedBatch& batch, const at::Tensor& factorization,
                                 bool refreshed, const at::Tensor& found_inf) {
  c10::NoGradGuard no_grad;
  const bool by_cg = uses_conjugate_gradients(factorization);
  const at::Tensor report = at::zeros({3}, state.status.options().dtype(at::kDouble));
  if (params.empty()) {
    return report;
  }
  check_arguments(h, params, grads, state, factorization);
  const Jacobian J(params, batch.uses, batch.scale, batch.loss_scale);
  check_factorization(factorization, J);
  std::optional<Jacobian::Sketch> images;
  if (refreshed && !by_cg && params[0].is_cpu()) {
    images = sketch_gradient(J, working_gradients(params, grads, StepGate::open()));
  }
  const StepGate gate = check_gradients(params, grads, state, images, found_inf);
  if (gate.skipped_on_host()) {
    return report;
  }
  gate.advance(state.steps);
  const ParameterVector v = working_gradients(params, grads, gate);
  ParameterVector d;
  if (by_cg) {
    ConjugateGradientsResult solution =
        cg_direction(J, h.dampings, h.eps, v, momentum_part(h, state));
    d = std::move(solution.x);
    report.select(0, 0).fill_(solution.iterations);
    report.select(0, 1).copy_(solution.relative_residual);
    report.select(0, 2).fill_(1);
  } else {
    const GradientSplit split =
        refreshed ? split_gradient(J, v, gradient_roundings(grads, batch.uses), images)
                  : GradientSplit{at::zeros({}, report.options()), v};
    const SampleSpaceSolution solution =
        solve_in_sample_space(J, h.dampings, split, momentum_part(h, state), factorization);
    if (can_add_directly(h, params, batch, solution, factorization)) {
      add_directly(h, params, J, solution.w, state.status);
      return report;
    }
    d = direction(J, h.dampings, solution);
  }
  apply_direction(h, params, d, state, gate);
  return report;
}

}  // namespace torchium::optim::detail
