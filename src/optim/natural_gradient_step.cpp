#include "optim/natural_gradient_step.h"

#include "gradients/jacobian.h"
#include "optim/conjugate_gradients.h"
#include "optim/elementwise.h"
#include "optim/parameter_vectors.h"
#include "optim/step_gate.h"
#include "optim/step_inputs.h"
#include "optim/step_status.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace torchium::optim::detail {
namespace {

using gradients::detail::Jacobian;

// Above this order the factorisation costs more than conjugate gradients.
constexpr int64_t kMaxGramSamples = 4096;

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

// Rounding error of a gradient, relative to its norm, that was computed in this dtype.
double rounding_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-12;
    case at::kHalf:
      return 2.0 * std::numeric_limits<at::Half>::epsilon();
    case at::kBFloat16:
      return 2.0 * std::numeric_limits<at::BFloat16>::epsilon();
    default:
      return 1e-5;
  }
}

// How well the gradient of each parameter is known. The layer may have computed it in a lower
// precision than its own, as under autocast.
std::vector<double> gradient_roundings(at::TensorList grads, const CapturedBatch& batch) {
  std::vector<double> roundings;
  for (const auto& grad : grads) {
    roundings.push_back(rounding_of(grad.scalar_type()));
  }
  for (const auto& use : batch.uses) {
    double rounding = rounding_of(use.output_gradient.scalar_type());
    if (at::isFloatingType(use.input.scalar_type())) {
      rounding = std::max(rounding, rounding_of(use.input.scalar_type()));
    }
    for (const int64_t p : {use.weight, use.bias}) {
      if (p >= 0) {
        roundings[p] = std::max(roundings[p], rounding);
      }
    }
  }
  return roundings;
}

// The gradient as v = c u + r, u = J^T 1 / n: its part along the mean of the captured gradients,
// and what clipping or weight decay has added to it.
struct GradientSplit {
  at::Tensor c;       // 0-dim float64
  ParameterVector r;  // empty: zero
};

// With r orthogonal to u. Within rounding it counts as zero: it would be multiplied by 1 / damping.
GradientSplit split(const ParameterVector& v, const ParameterVector& u,
                    const std::vector<double>& roundings) {
  const at::Tensor uu = dot(u, u);
  const at::Tensor c = at::where(uu == 0, 0.0, dot(v, u) / uu);
  ParameterVector r;
  for (const auto& tensor : v) {
    r.push_back(tensor.clone());
  }
  add_scaled_(r, u, c.neg());
  const at::Tensor weights = at::tensor(roundings, at::TensorOptions(at::kDouble)).to(c.device());
  const at::Tensor negligible = dot(r, r) <= dot({weights.square_()}, {dots(v, v)});
  if (!negligible.is_cpu()) {
    for (auto& tensor : r) {
      tensor.masked_fill_(negligible, 0);
    }
    return {c, r};
  }
  return negligible.item<bool>() ? GradientSplit{c, {}} : GradientSplit{c, r};
}

GradientSplit split_gradient(const Jacobian& J, const ParameterVector& v,
                             const std::vector<double>& roundings) {
  const at::Tensor mean = at::full({J.samples()}, 1.0 / static_cast<double>(J.samples()),
                                   v[0].options().dtype(at::kDouble));
  if (v[0].is_cpu()) {
    // Mostly r = 0, which random images of v and u tell as well, for a fraction of the work.
    const auto [of_v, of_u] = J.sketch(v, mean);
    GradientSplit of_images = split(of_v, of_u, roundings);
    if (of_images.r.empty()) {
      return of_images;
    }
  }
  return split(v, J.transpose_product(mean), roundings);
}

// Tensors x_p times numbers; no tensors mean zero.
struct ScaledVector {
  ParameterVector x;
  std::vector<double> scales;
};

// x <- x + y
void add_(ParameterVector& x, const ScaledVector& y) {
  for (size_t p = 0; p < y.x.size(); ++p) {
    x[p].add_(y.x[p], y.scales[p]);
  }
}

// mu d_prev
ScaledVector momentum_part(const NaturalGradientHyperparameters& h,
                           const NaturalGradientState& state) {
  return has_momentum(h) ? ScaledVector{state.momentum_buffers, h.momentums} : ScaledVector{};
}

// Lambda^-1 x
ParameterVector divided_by_dampings(const std::vector<double>& dampings, const ParameterVector& x) {
  ParameterVector result;
  for (size_t p = 0; p < x.size(); ++p) {
    result.push_back(x[p] / dampings[p]);
  }
  return result;
}

// d = mu d_prev + (F + Lambda)^-1 (v - F mu d_prev) in sample space. With v = c J^T 1 / n + r,
// x = mu d_prev + Lambda^-1 r and S = J Lambda^-1 J^T / n + I it is
//   x + Lambda^-1 J^T S^-1 (c 1 - J x) / n.
// With r for all of v (c = 0) the two terms would cancel, and lose their digits.
ParameterVector gram_direction(const NaturalGradientHyperparameters& h, const Jacobian& J,
                               const GradientSplit& v, const ScaledVector& previous,
                               const at::Tensor& L) {
  ScaledVector x = previous;
  if (!v.r.empty()) {
    x = {divided_by_dampings(h.dampings, v.r), std::vector<double>(v.r.size(), 1.0)};
    add_(x.x, previous);
  }
  at::Tensor y = v.c.expand({J.samples()});
  if (!x.x.empty()) {
    y = y - J.product(x.x, x.scales);
  }
  const double n = static_cast<double>(J.samples());
  const at::Tensor w = at::cholesky_solve(y.unsqueeze(1), L).squeeze(1).div_(n);
  std::vector<double> inverse_dampings;
  for (const double damping : h.dampings) {
    inverse_dampings.push_back(1.0 / damping);
  }
  ParameterVector d = J.transpose_product(w, inverse_dampings);
  add_(d, x);
  return d;
}

// The same in parameter space.
ConjugateGradientsResult cg_direction(const NaturalGradientHyperparameters& h, const Jacobian& J,
                                      ParameterVector v, const ScaledVector& previous) {
  const double n = static_cast<double>(J.samples());
  const auto damped_fisher = [&](const ParameterVector& x) {
    ParameterVector result = J.transpose_product(J.product(x).div_(n));
    add_(result, {x, h.dampings});
    return result;
  };
  const auto precondition = [&](const ParameterVector& x) {
    return divided_by_dampings(h.dampings, x);
  };
  if (!previous.x.empty()) {
    const ParameterVector known =
        J.transpose_product(J.product(previous.x, previous.scales).div_(n));
    for (size_t p = 0; p < v.size(); ++p) {
      v[p] = v[p] - known[p];
    }
  }
  int64_t size = 0;
  double floor = 0.0;
  for (const auto& tensor : v) {
    size += tensor.numel();
    floor = std::max(floor, tensor.scalar_type() == at::kDouble
                                ? std::numeric_limits<double>::epsilon()
                                : std::numeric_limits<float>::epsilon());
  }
  // As many iterations as F has non-zero eigenvalues, and one, would do without rounding.
  const int64_t rank = std::min(size, J.samples());
  const ConjugateGradientsRule rule{std::max(h.eps, 4 * floor),
                                    std::min<int64_t>(4 * rank + 20, 1000)};
  ConjugateGradientsResult result = conjugate_gradients(damped_fisher, precondition, v, rule);
  add_(result.x, previous);
  return result;
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

// lr, with its sign and the factor that keeps the direction within max_norm.
StepScalar step_size(const StepScalar& lr, bool maximize, const at::Tensor& norm_factor) {
  const double sign = maximize ? -1.0 : 1.0;
  if (lr.device.defined()) {
    return {0.0, lr.device * norm_factor * sign};
  }
  return {lr.host * norm_factor.item<double>() * sign, {}};
}

}  // namespace

at::Tensor natural_gradient_factorize(at::TensorList params, const CapturedBatch& batch,
                                      const std::vector<double>& dampings,
                                      const std::string& solver) {
  c10::NoGradGuard no_grad;
  check_solver(solver);
  check_dampings(dampings, params.size());
  const Jacobian J(params, batch.uses, batch.scale, batch.loss_scale);
  const int64_t n = J.samples();
  int64_t size = 0;
  std::vector<double> weights;
  for (size_t p = 0; p < params.size(); ++p) {
    size += params[p].numel();
    weights.push_back(1.0 / (dampings[p] * static_cast<double>(n)));
  }
  if (solver == "cg" || (solver == "auto" && (n > size || n > kMaxGramSamples))) {
    return at::empty({0, 0}, batch.uses[0].output_gradient.options().dtype(at::kDouble));
  }
  at::Tensor S = J.gram(weights);
  S.diagonal().add_(1.0);
  const auto [L, info] = at::linalg_cholesky_ex(S);
  return at::where(info == 0, L, std::numeric_limits<double>::quiet_NaN());
}

at::Tensor natural_gradient_step(const NaturalGradientHyperparameters& h, at::TensorList params,
                                 at::TensorList grads, NaturalGradientState& state,
                                 const CapturedBatch& batch, const at::Tensor& factorization,
                                 bool refreshed, const at::Tensor& found_inf) {
  c10::NoGradGuard no_grad;
  const bool by_cg = uses_conjugate_gradients(factorization);
  const at::Tensor report = at::zeros({3}, state.status.options().dtype(at::kDouble)).fill_(0.0);
  if (params.empty()) {
    return report;
  }
  check_arguments(h, params, grads, state, factorization);
  const Jacobian J(params, batch.uses, batch.scale, batch.loss_scale);
  check_factorization(factorization, J);
  const StepGate gate = StepGate::check(grads, state.status, found_inf);
  if (gate.skipped_on_host()) {
    return report;
  }
  gate.advance(state.steps);
  ParameterVector v;
  for (size_t p = 0; p < params.size(); ++p) {
    v.push_back(
        signed_gradient(params[p], grads[p], /*maximize=*/false, /*weight_decay=*/0.0, gate));
  }
  ParameterVector d;
  if (by_cg) {
    ConjugateGradientsResult solution = cg_direction(h, J, v, momentum_part(h, state));
    d = std::move(solution.x);
    report.select(0, 0).fill_(solution.iterations);
    report.select(0, 1).copy_(solution.relative_residual);
    report.select(0, 2).fill_(1);
  } else {
    const GradientSplit split = refreshed ? split_gradient(J, v, gradient_roundings(grads, batch))
                                          : GradientSplit{at::zeros({}, report.options()), v};
    d = gram_direction(h, J, split, momentum_part(h, state), factorization);
  }
  const at::Tensor squares = dots(d, d);
  record_failure(squares, gate, state.status);
  const StepGate accepted = gate.narrowed(squares.isfinite().all());
  if (accepted.skipped_on_host()) {
    return report;
  }
  const at::Tensor norm_factor = h.max_norm ? (*h.max_norm / squares.sum().sqrt_()).clamp_max_(1.0)
                                            : at::ones({}, report.options());
  for (size_t p = 0; p < params.size(); ++p) {
    at::Tensor param = params[p];
    const at::Tensor direction = accepted.zero_if_skipped(d[p]);
    if (h.momentums[p] != 0.0) {
      accepted.assign_(state.momentum_buffers[p], direction);
    }
    apply_update({}, step_size(accepted.learning_rate(h.lrs[p]), h.maximize[p], norm_factor), param,
                 direction, nullptr, accepted);
  }
  return report;
}

}  // namespace torchium::optim::detail
