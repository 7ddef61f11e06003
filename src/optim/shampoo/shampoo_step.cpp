#include "optim/shampoo/shampoo_step.h"

#include "linalg/products/batched_products.h"
#include "optim/blocked/preconditioner.h"
#include "optim/core/argument_checks.h"
#include "optim/core/step_prologue.h"
#include "optim/shampoo/cuda/shampoo_kernels.h"
#include "optim/shampoo/shampoo_rules.h"
#include "optim/shampoo/shampoo_subset.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>

namespace torchium::optim::detail {
namespace {

std::vector<Blocking> make_blockings(const ShampooHyperparameters& h, at::TensorList params) {
  std::vector<Blocking> blockings;
  blockings.reserve(params.size());
  for (const at::Tensor& param : params) {
    blockings.push_back(shampoo_blocking(h, param.sizes()));
  }
  return blockings;
}

RootRule root_rule(const ShampooHyperparameters& h) {
  return {h.eps, h.relative_eps, h.exponent, h.root_method, h.exponent_warmup};
}

StepRule step_rule(const ShampooHyperparameters& h) {
  return {.beta1 = h.beta1 > 0.0 ? h.beta1 : 1.0,
          .moment_beta = h.grafting == "adam" ? h.grafting_beta2 : 1.0,
          .beta2 = h.beta2,
          .start = static_cast<double>(h.start_preconditioning_step),
          .weight_decay = h.l2_penalty()};
}

Schedule make_schedule(const ShampooHyperparameters& h, const StateList& states,
                       at::IntArrayRef host_steps) {
  Schedule schedule;
  const bool host_knows = !h.capturable || states[0].step.is_cpu();
  for (size_t i = 0; i < states.size(); ++i) {
    const int64_t t = host_knows ? step_on_host(states[i].step, host_steps, i) : kLateStep;
    const bool due = !h.capturable && root_is_due(t, h.start_preconditioning_step, h.update_freq);
    schedule.due_steps.push_back(due ? t : 0);
    schedule.started.push_back(t >= h.start_preconditioning_step);
    schedule.any_root_due |= due;
  }
  return schedule;
}

// The options that decide about the work, apart from numbers that it is done with.
auto structure(const ShampooHyperparameters& h) {
  return std::tuple(h.block_size, h.merge_dims, h.preconditioner_1d, h.preconditioned,
                    h.max_preconditioned_dim, h.grafting, h.beta1 > 0.0, h.momentum > 0.0,
                    h.l2_penalty());  // limits the gradients
}

// What the hyper-parameters need is there and fits the parameter; the rest is left out.
void check_state(const ShampooHyperparameters& h, ParameterRule rule, const at::Tensor& param,
                 size_t index, ParameterState& state) {
  const auto use = [&](at::Tensor& tensor, bool needed, const char* name) {
    if (needed) {
      check_state_tensor(tensor, param, name, index);
    } else {
      tensor.reset();
    }
  };
  use(state.exp_avg, h.beta1 > 0.0, "exp_avg");
  use(state.grafting_second_moment, uses_second_moment(h), "grafting_second_moment");
  use(state.momentum_buffer, h.momentum > 0.0, "momentum_buffer");
  use(state.diagonal, rule == ParameterRule::kDiagonal, "diagonal");
  for (const at::Tensor& start : {state.exp_avg_start, state.grafting_second_moment_start}) {
    TORCH_CHECK_VALUE(!start.defined() || (start.scalar_type() == at::kDouble &&
                                           start.numel() == 1 && start.device() == param.device()),
                      "the step count when an average of params[", index,
                      "] began must be one float64 number on ", param.device());
  }
}

}  // namespace

bool uses_second_moment(const ShampooHyperparameters& h) {
  return h.grafting.has_value() && *h.grafting != "sgd";
}

Blocking shampoo_blocking(const ShampooHyperparameters& h, at::IntArrayRef shape) {
  auto dims = merged_dims(shape, h.block_size, h.merge_dims);
  return parameter_rule(h, dims) == ParameterRule::kMatrices
             ? make_blocking(std::move(dims), h.block_size)
             : Blocking{std::move(dims), {}};
}

BlockStorage shampoo_init_state(const ShampooHyperparameters& h, at::TensorList params) {
  c10::NoGradGuard no_grad;
  return make_block_storage(params, make_blockings(h, params), h.root_dtype);
}

ShampooStep::ShampooStep(ShampooHyperparameters h, std::vector<at::Tensor> params, StateList states,
                         at::Tensor status)
    : h_(std::move(h)),
      group_(std::make_unique<ShampooGroup>(
          ShampooGroup{std::move(params), std::move(states), {}, {}})),
      status_(std::move(status)) {
  ShampooGroup& group = *group_;
  check_parameters(group.params, list_of(group.states, &ParameterState::step), status_);
  group.blockings = make_blockings(h_, group.params);
  for (size_t i = 0; i < group.params.size(); ++i) {
    group.rules.push_back(parameter_rule(h_, group.blockings[i].dims));
    check_state(h_, group.rules[i], group.params[i], i, group.states[i]);
  }
  part_parameters();
}

ShampooStep::~ShampooStep() = default;

void ShampooStep::part_parameters() {
  const ShampooGroup& group = *group_;
  const c10::DeviceGuard guard(group.params[0].device());
  prologue_ = StepPrologue::make(group.params, group.states, status_, h_.l2_penalty());
  std::vector<size_t> by_kernels, eager;
  for (size_t i = 0; i < group.params.size(); ++i) {
    (has_shampoo_kernels(h_, group, i) ? by_kernels : eager).push_back(i);
  }
  batches_ = find_batches(group.blockings, group.states, by_kernels);
  const size_t count = batches_.size();
  std::ranges::move(find_batches(group.blockings, group.states, eager),
                    std::back_inserter(batches_));
  const std::span<MatrixBatch> all(batches_);
  all_by_kernels_ = eager.empty();
  if (!by_kernels.empty()) {
    subsets_.push_back(make_shampoo_kernels(h_, group, by_kernels, all.first(count), *prologue_));
  }
  if (!eager.empty()) {
    subsets_.push_back(make_eager_subset(group, std::move(eager), all.subspan(count)));
  }
}

bool ShampooStep::adopt(const ShampooHyperparameters& h) {
  const bool fits = structure(h) == structure(h_);
  if (fits) {
    h_ = h;
  }
  return fits;
}

void ShampooStep::begin(std::vector<at::Tensor> grads) {
  PlannedStep::begin(std::move(grads));
  const c10::DeviceGuard guard(group_->params[0].device());
  prologue_->begin(grads_);
}

void ShampooStep::run(const at::Tensor& lr, at::IntArrayRef host_steps,
                      const at::Tensor& found_inf) {
  const ShampooGroup& group = *group_;
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard guard(group.params[0].device());
  const auto end = c10::make_scope_exit([&] {
    for (const auto& subset : subsets_) {
      subset->end();
    }
  });
  {
    RECORD_FUNCTION("torchium::elementwise", {});
    if (!prologue_->run(step_rule(h_), found_inf)) {  // t <- t + 1, unless it is skipped
      return;
    }
  }
  const Schedule schedule = make_schedule(h_, group.states, host_steps);
  const ShampooRun run{h_, lr, grads_, schedule, *prologue_};
  const auto each = [&](const char* name, void (ShampooSubset::*part)(const ShampooRun&)) {
    RECORD_FUNCTION(name, {});
    for (const auto& subset : subsets_) {
      (subset.get()->*part)(run);
    }
  };

  each("torchium::elementwise", &ShampooSubset::moments);    // m <- b1 m + (1 - b1) g; v, a
  each("torchium::statistics", &ShampooSubset::statistics);  // L_i <- b2 L_i + (1 - b2) g_i g_i^T
  if (schedule.any_root_due) {                               // R_i <- (L_i / c + eps I)^(-1/(2k))
    RECORD_FUNCTION("torchium::roots", {});
    std::vector<StepScalar> c;
    for (size_t i = 0; i < group.params.size(); ++i) {
      c.push_back(prologue_->correction(Average::kStatistics, i));
    }
    update_roots(batches_, root_rule(h_), schedule.due_steps, c, prologue_->guard());
    record_root_failures(batches_, status_);
  }
  each("torchium::precondition", &ShampooSubset::precondition);  // d <- m x_1 R_1 ... x_k R_k
  each("torchium::elementwise", &ShampooSubset::apply);          // p <- p - lr |f| / |d| d
}

void ShampooStep::end() {
  prologue_->end();
  PlannedStep::end();
}

// Kernels renew all roots, with the exponent of all later steps.
bool ShampooStep::roots_fit_graphs(int64_t t) const {
  return t >= h_.exponent_warmup && std::ranges::all_of(batches_, [&](const MatrixBatch& batch) {
           return renews_on_device(batch, root_rule(h_));
         });
}

std::optional<GraphKey> ShampooStep::graph_key(at::IntArrayRef host_steps) const {
  if (!all_by_kernels_) {
    return std::nullopt;
  }
  size_t due = 0;                            // parameters with a root that is due
  for (const int64_t before : host_steps) {  // none: a capturable step leaves the roots alone
    const int64_t t = before + 1;
    const bool is_due = root_is_due(t, h_.start_preconditioning_step, h_.update_freq);
    if (t < h_.start_preconditioning_step || (is_due && !roots_fit_graphs(t))) {
      return std::nullopt;
    }
    due += is_due ? 1 : 0;
  }
  if (due != 0 && due != host_steps.size()) {
    return std::nullopt;
  }
  GraphKey key{static_cast<uint8_t>(linalg::detail::matmul_precision(h_.matmul_precision)),
               static_cast<uint8_t>(due != 0)};
  prologue_->add_to(key);
  return key;
}

void shampoo_update_preconditioners(const ShampooHyperparameters& h,
                                    const std::vector<at::Tensor>& params, const StateList& states,
                                    at::Tensor status) {
  c10::NoGradGuard no_grad;
  check_parameters(params, list_of(states, &ParameterState::step), status);
  const auto blockings = make_blockings(h, params);
  std::vector<size_t> all(params.size());
  std::iota(all.begin(), all.end(), 0);
  auto batches = find_batches(blockings, states, all);
  std::vector<StepScalar> c;
  for (const ParameterState& state : states) {
    c.push_back(bias_correction(h.beta2, state.step, {}));
  }
  const std::vector<int64_t> due_steps(params.size(), kLateStep);
  update_roots(batches, root_rule(h), due_steps, c, FoundInfGuard::open());
  record_root_failures(batches, status);
}

}  // namespace torchium::optim::detail
