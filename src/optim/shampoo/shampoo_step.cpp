#include "optim/shampoo/shampoo_step.h"

#include "linalg/products/batched_products.h"
#include "optim/blocked/blocking.h"
#include "optim/blocked/elementwise.h"
#include "optim/blocked/grafting.h"
#include "optim/blocked/preconditioner.h"
#include "optim/core/argument_checks.h"
#include "optim/core/found_inf_guard.h"
#include "optim/shampoo/cuda/fused_step.h"
#include "optim/shampoo/shampoo_rules.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

// The blocks of each parameter; none for those that no matrices precondition.
std::vector<Blocking> make_blockings(at::TensorList params, const ShampooHyperparameters& h) {
  std::vector<Blocking> blockings;
  blockings.reserve(params.size());
  for (const auto& param : params) {
    auto dims = merged_dims(param.sizes(), h.block_size, h.merge_dims);
    blockings.push_back(parameter_rule(h, dims) == ParameterRule::kMatrices
                            ? make_blocking(std::move(dims), h.block_size)
                            : Blocking{std::move(dims), {}});
  }
  return blockings;
}

// 1 - beta^t of each parameter, t counted from `starts` (empty: 0); 1 for a plain sum (beta = 1). A
// first step that was skipped has t = 0, where 0 would make 0 / 0: it counts as t = 1.
std::vector<StepScalar> bias_corrections(const Tensors& steps, double beta,
                                         const Tensors& starts = {}) {
  std::vector<StepScalar> corrections(steps.size());
  if (beta == 1.0) {
    return corrections;
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].is_cpu()) {
      const double start = starts.empty() ? 0.0 : count_on_cpu(starts[i]);
      corrections[i].host = 1.0 - std::pow(beta, std::max(count_on_cpu(steps[i]) - start, 1.0));
    } else {
      const at::Tensor t = starts.empty() ? steps[i] : steps[i] - starts[i];
      corrections[i].device = 1.0 - at::pow(beta, t.to(at::kDouble).clamp_min(1.0));
    }
  }
  return corrections;
}

Corrections bias_corrections(const ShampooHyperparameters& h, const ShampooState& state) {
  const double moment_beta = h.grafting == "adam" ? h.grafting_beta2 : 1.0;
  return {.exp_avg = bias_corrections(state.steps, h.beta1, state.exp_avg_starts),
          .second_moment = bias_corrections(state.steps, moment_beta, state.second_moment_starts),
          .statistics = bias_corrections(state.steps, h.beta2)};
}

GradientRule gradient_rule(const ShampooHyperparameters& h) {
  return {.maximize = h.maximize,
          .weight_decay = h.decoupled_weight_decay ? 0.0 : h.weight_decay,
          .beta1 = h.beta1,
          .moment_beta = h.grafting == "adagrad" ? 1.0 : h.grafting_beta2,
          .grafting_eps = h.grafting_eps,
          .diagonal_beta = h.beta2,
          .diagonal_eps = h.eps};
}

// What the gradients of all parameters become (elementwise.h), and the blocks they are written to.
struct Gradients {
  Tensors g, m, f, d;
  Tensors g_blocks, m_blocks, f_blocks;  // one a batch; undefined where nothing is set aside
};

Gradients set_aside_gradients(const ShampooHyperparameters& h, at::TensorList params,
                              const std::vector<Blocking>& blockings,
                              const std::vector<MatrixBatch>& batches, const FusedStep& fused) {
  const auto count = params.size();
  Gradients all{Tensors(count), Tensors(count), Tensors(count), Tensors(count), {}, {}, {}};
  for (const auto& batch : batches) {
    const auto set_aside = [&](bool needed, Tensors& tensors) {
      return needed && !fused.supports(batch) ? set_aside_blocks(batch, blockings, params, tensors)
                                              : at::Tensor();
    };
    all.g_blocks.push_back(set_aside(true, all.g));
    all.m_blocks.push_back(set_aside(h.beta1 > 0.0, all.m));
    all.f_blocks.push_back(set_aside(uses_second_moment(h), all.f));
  }
  return all;
}

// The gradient of one parameter and the state that is made of it. `diagonal` counts those with the
// diagonal rule.
GradientElements gradient_elements(const ShampooHyperparameters& h, size_t i, at::TensorList params,
                                   at::TensorList grads, const Corrections& corrections,
                                   const ShampooState& state, const at::Tensor& diagonal) {
  return {.param = params[i],
          .grad = grads[i],
          .exp_avg = h.beta1 > 0.0 ? state.exp_avgs[i] : at::Tensor(),
          .moment = uses_second_moment(h) ? state.grafting_second_moments[i] : at::Tensor(),
          .diagonal = diagonal,
          .exp_avg_correction = corrections.exp_avg[i],
          .moment_correction = corrections.second_moment[i],
          .diagonal_correction = corrections.statistics[i],
          .g = {},
          .m = {},
          .f = {},
          .d = {}};
}

// One pass over each gradient that no kernel serves: g, m and f of the parameter, d of those with
// the diagonal rule. Those with the grafted rule are left to apply_updates().
Gradients pass_over_gradients(const ShampooHyperparameters& h, at::TensorList params,
                              at::TensorList grads, const std::vector<Blocking>& blockings,
                              const std::vector<MatrixBatch>& batches, const FusedStep& fused,
                              const Corrections& corrections, ShampooState& state,
                              const FoundInfGuard& guard) {
  if (fused.supports_all()) {
    return {};
  }
  const GradientRule rule = gradient_rule(h);
  Gradients all = set_aside_gradients(h, params, blockings, batches, fused);
  for (size_t i = 0, diagonal = 0; i < params.size(); ++i) {
    const ParameterRule of_param = parameter_rule(h, blockings[i].dims);
    const bool has_diagonal = of_param == ParameterRule::kDiagonal;
    const at::Tensor diagonal_state = has_diagonal ? state.diagonals[diagonal++] : at::Tensor();
    if (fused.supports()[i] || of_param == ParameterRule::kGrafted) {
      continue;
    }
    GradientElements e = gradient_elements(h, i, params, grads, corrections, state, diagonal_state);
    e.g = all.g[i];
    e.m = all.m[i];
    e.f = all.f[i];
    gradient_pass(rule, e, guard);
    all.g[i] = e.g;
    all.m[i] = e.m;
    all.f[i] = e.f.defined() ? e.f : e.m;
    all.d[i] = e.d;
    if (has_diagonal && h.grafting.has_value()) {
      all.d[i] = graft_diagonal(e.d, all.f[i], h.block_size);
    }
  }
  return all;
}

RootRule root_rule(const ShampooHyperparameters& h) {
  return {h.eps, h.relative_eps, h.exponent, h.root_method, h.exponent_warmup};
}

// What the host decides about each parameter.
struct Schedule {
  std::vector<int64_t> due_steps;  // t where a root is due, else 0
  std::vector<bool> started;       // false: still the first steps, which use the grafted direction
  bool any_root_due = false;
};

Schedule make_schedule(const ShampooHyperparameters& h, const Tensors& steps,
                       at::IntArrayRef host_steps) {
  Schedule schedule;
  const bool host_knows = !h.capturable || steps[0].is_cpu();
  const auto t = host_knows ? steps_on_host(steps, host_steps) : std::vector<int64_t>();
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool due =
        !h.capturable && root_is_due(t[i], h.start_preconditioning_step, h.update_freq);
    schedule.due_steps.push_back(due ? t[i] : 0);
    schedule.started.push_back(!host_knows || t[i] >= h.start_preconditioning_step);
    schedule.any_root_due |= due;
  }
  return schedule;
}

// Before start_preconditioning_step the direction is the grafted one (m without grafting).
void use_grafting_at_first(const ShampooHyperparameters& h, const Schedule& schedule,
                           const FusedStep& fused, const Tensors& steps, const Tensors& f,
                           Tensors& d) {
  for (size_t i = 0; i < d.size(); ++i) {
    if (fused.supports()[i] || !d[i].defined()) {  // the grafted rule has no start
      continue;
    }
    if (!schedule.started[i]) {
      d[i] = f[i];
    } else if (h.capturable && h.start_preconditioning_step > 1) {
      d[i] = at::where(steps[i].ge(h.start_preconditioning_step), d[i], f[i]);
    }
  }
}

// Parameters with the grafted rule have no direction yet: theirs is f, in one pass with the update.
void apply_updates(const ShampooHyperparameters& h, at::TensorList params, at::TensorList grads,
                   const std::vector<Blocking>& blockings, const FusedStep& fused,
                   const Tensors& directions, const Corrections& corrections, ShampooState& state,
                   const FoundInfGuard& guard) {
  if (fused.supports_all()) {
    return;
  }
  const StepScalar lr = guard.learning_rate(h.lr);
  const UpdateRule rule{.decoupled_weight_decay = h.decoupled_weight_decay ? h.weight_decay : 0.0,
                        .momentum = h.momentum,
                        .nesterov = h.nesterov};
  for (size_t i = 0; i < params.size(); ++i) {
    if (fused.supports()[i]) {
      continue;
    }
    at::Tensor param = params[i];
    at::Tensor* buffer = h.momentum > 0.0 ? &state.momentum_buffers[i] : nullptr;
    if (parameter_rule(h, blockings[i].dims) == ParameterRule::kGrafted) {
      GradientElements e = gradient_elements(h, i, params, grads, corrections, state, {});
      grafted_step(gradient_rule(h), rule, lr, e, buffer, guard);
    } else {
      apply_update(rule, lr, param, directions[i], buffer, guard);
    }
  }
}

// t <- t + 1 unless a gradient skips the step.
FoundInfGuard begin_step(const ShampooHyperparameters& h, at::TensorList params,
                         at::TensorList grads, ShampooState& state, const at::Tensor& found_inf) {
  const std::vector<double> weight_decays(params.size(),
                                          h.decoupled_weight_decay ? 0.0 : h.weight_decay);
  const FoundInfGuard guard = FoundInfGuard::check(
      examined_gradients(params, grads, state.steps, weight_decays), state.status, found_inf);
  if (!guard.skipped_on_host()) {
    guard.advance(state.steps);
  }
  return guard;
}

void check_starts(const Tensors& starts, at::TensorList params, const char* name) {
  TORCH_CHECK_VALUE(starts.empty() || starts.size() == params.size(), name, " has ", starts.size(),
                    " tensors for ", params.size(), " params; pass one each, or none");
  for (size_t i = 0; i < starts.size(); ++i) {
    TORCH_CHECK_VALUE(starts[i].scalar_type() == at::kDouble && starts[i].numel() == 1 &&
                          starts[i].device() == params[i].device(),
                      name, "[", i, "] must be one float64 number on ", params[i].device());
  }
}

void check_state(const ShampooHyperparameters& h, at::TensorList params, const ShampooState& state,
                 const std::vector<Blocking>& blockings) {
  check_parameters(params, state.steps, state.status);
  check_state_list(state.exp_avgs, params, h.beta1 > 0.0, "exp_avgs");
  check_state_list(state.grafting_second_moments, params, uses_second_moment(h),
                   "grafting_second_moments");
  check_state_list(state.momentum_buffers, params, h.momentum > 0.0, "momentum_buffers");
  check_starts(state.exp_avg_starts, params, "exp_avg_starts");
  check_starts(state.second_moment_starts, params, "second_moment_starts");
  Tensors with_diagonal;
  for (size_t i = 0; i < params.size(); ++i) {
    if (parameter_rule(h, blockings[i].dims) == ParameterRule::kDiagonal) {
      with_diagonal.push_back(params[i]);
    }
  }
  check_state_list(state.diagonals, with_diagonal, true, "diagonals");
}

// The options that decide about the work, apart from numbers that it is done with.
auto structure(const ShampooHyperparameters& h) {
  const double penalty = h.decoupled_weight_decay ? 0.0 : h.weight_decay;  // limits the gradients
  return std::tuple(h.block_size, h.merge_dims, h.preconditioner_1d, h.preconditioned,
                    h.max_preconditioned_dim, h.grafting, h.beta1 > 0.0, h.momentum > 0.0, penalty);
}

// Frees the memory of a step, however it ends.
class EndOfStep {
 public:
  explicit EndOfStep(FusedStep& fused) : fused_(fused) {}
  ~EndOfStep() { fused_.end(); }
  EndOfStep(const EndOfStep&) = delete;
  EndOfStep& operator=(const EndOfStep&) = delete;

 private:
  FusedStep& fused_;
};

}  // namespace

bool uses_second_moment(const ShampooHyperparameters& h) {
  return h.grafting.has_value() && *h.grafting != "sgd";
}

BlockStorage shampoo_init_state(const ShampooHyperparameters& h, at::TensorList params) {
  c10::NoGradGuard no_grad;
  return make_block_storage(params, make_blockings(params, h), h.root_dtype);
}

ShampooStep::ShampooStep(ShampooHyperparameters h, Tensors params, ShampooState state)
    : h_(std::move(h)),
      params_(std::move(params)),
      state_(std::move(state)),
      blockings_(make_blockings(params_, h_)) {
  if (params_.empty()) {
    return;
  }
  check_state(h_, params_, state_, blockings_);
  const c10::DeviceGuard device_guard(params_[0].device());
  fused_ = std::make_unique<FusedStep>(h_, params_, blockings_, state_);
  batches_ = find_batches(blockings_, {state_.statistics, state_.roots, state_.root_failures},
                          fused_->supports());
  fused_->plan(h_, batches_);
}

ShampooStep::~ShampooStep() = default;

bool ShampooStep::adopt(const ShampooHyperparameters& h) {
  const bool fits = structure(h) == structure(h_);
  if (fits) {
    h_ = h;
  }
  return fits;
}

void ShampooStep::run(const at::Tensor& lr, at::TensorList grads, at::IntArrayRef host_steps,
                      const at::Tensor& found_inf) {
  if (params_.empty()) {
    return;
  }
  c10::NoGradGuard no_grad;
  check_gradients(params_, grads);
  check_host_steps(host_steps, params_.size(), state_.status, !h_.capturable);
  const c10::DeviceGuard device_guard(params_[0].device());
  const ShampooHyperparameters& h = h_;
  h_.lr = lr;
  FusedStep& fused = *fused_;
  const EndOfStep end_of_step(fused);

  FoundInfGuard step_guard = FoundInfGuard::open();
  if (fused.is_available()) {
    fused.begin(h, grads, found_inf);
  } else {
    step_guard = begin_step(h, params_, grads, state_, found_inf);
    if (step_guard.skipped_on_host()) {
      return;
    }
  }
  const Schedule schedule = make_schedule(h, state_.steps, host_steps);
  if (fused.is_available() && (schedule.any_root_due || !fused.supports_all())) {
    step_guard = fused.guard();
  }
  const Corrections corrections =
      fused.is_available() ? fused.corrections(schedule.any_root_due) : bias_corrections(h, state_);

  // g + wd p; m: EMA of g, or g; f: m / (sqrt(v) + grafting_eps), or m; d: m (a / c + eps)^(-1/2)
  fused.gather();
  Gradients x = pass_over_gradients(h, params_, grads, blockings_, batches_, fused, corrections,
                                    state_, step_guard);

  fused.update_statistics();  // L_i <- b2 L_i + (1 - b2) mat_i(g) mat_i(g)^T
  Tensors g(batches_.size());
  for (size_t b = 0; b < batches_.size(); ++b) {
    if (!fused.supports(batches_[b])) {
      RECORD_FUNCTION("torchium::statistics", {});
      g[b] = pack(batches_[b], blockings_, x.g, x.g_blocks[b]);
      update_statistics(batches_[b], g[b], h.beta2, step_guard);
    }
  }
  if (schedule.any_root_due) {  // R_i <- (L_i / c + eps I)^(-1/(2k))
    RECORD_FUNCTION("torchium::roots", {});
    update_roots(batches_, root_rule(h), schedule.due_steps, corrections.statistics, step_guard);
    record_root_failures(batches_, state_.status);
  }
  fused.precondition();  // m x_1 R_1 ... x_k R_k
  for (size_t b = 0; b < batches_.size(); ++b) {
    const auto& batch = batches_[b];
    if (fused.supports(batch)) {
      continue;
    }
    RECORD_FUNCTION("torchium::precondition", {});
    const at::Tensor m = h.beta1 == 0.0 ? g[b] : pack(batch, blockings_, x.m, x.m_blocks[b]);
    at::Tensor d = precondition(batch, m);
    if (h.grafting.has_value()) {  // |f| / |d| d
      d = graft(d, uses_second_moment(h) ? pack(batch, blockings_, x.f, x.f_blocks[b]) : m);
    }
    unpack(batch, blockings_, d, params_, x.d);
  }
  // Weight decay, momentum, p <- p - lr d.
  fused.update();
  use_grafting_at_first(h, schedule, fused, state_.steps, x.f, x.d);
  apply_updates(h, params_, grads, blockings_, fused, x.d, corrections, state_, step_guard);
}

std::optional<int64_t> ShampooStep::graph_key(at::IntArrayRef host_steps) const {
  if (params_.empty() || !fused_->is_available() || !fused_->fits_graphs()) {
    return std::nullopt;
  }
  if (!h_.capturable) {
    for (const int64_t before : host_steps) {
      const int64_t t = before + 1;
      if (t < h_.start_preconditioning_step ||
          root_is_due(t, h_.start_preconditioning_step, h_.update_freq)) {
        return std::nullopt;
      }
    }
  }
  return static_cast<int64_t>(linalg::detail::matmul_precision(h_.matmul_precision));
}

void shampoo_update_preconditioners(const ShampooHyperparameters& h, at::TensorList params,
                                    ShampooState& state) {
  c10::NoGradGuard no_grad;
  if (params.empty()) {
    return;
  }
  check_parameters(params, state.steps, state.status);
  const auto blockings = make_blockings(params, h);
  auto batches = find_batches(blockings, {state.statistics, state.roots, state.root_failures});
  const auto corrections = bias_corrections(state.steps, h.beta2);
  const std::vector<int64_t> all(params.size(), kLateStep);
  update_roots(batches, root_rule(h), all, corrections, FoundInfGuard::open());
  record_root_failures(batches, state.status);
}

}  // namespace torchium::optim::detail
