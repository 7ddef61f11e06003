#include "optim/shampoo/shampoo_plan.h"

#include <string>
#include <utility>

namespace torchium::optim::detail {
namespace {

ShampooState core_state(const ShampooHyperparameters& h, const StateList& states,
                        at::Tensor status) {
  using State = ParameterState;
  ShampooState state;
  state.steps = list_of(states, &State::step);
  state.statistics = slots_of(states, &State::statistics);
  state.roots = slots_of(states, &State::roots);
  state.root_failures = slots_of(states, &State::root_failures);
  state.diagonals = defined_list_of(states, &State::diagonal);
  if (h.beta1 > 0.0) {
    state.exp_avgs = defined_list_of(states, &State::exp_avg);
    state.exp_avg_starts = starts_of(states, &State::exp_avg_start);
  }
  if (uses_second_moment(h)) {
    state.grafting_second_moments = defined_list_of(states, &State::grafting_second_moment);
    state.second_moment_starts = starts_of(states, &State::grafting_second_moment_start);
  }
  if (h.momentum > 0.0) {
    state.momentum_buffers = defined_list_of(states, &State::momentum_buffer);
  }
  state.status = std::move(status);
  return state;
}

GraphMode graph_mode(const std::string& graphs) {
  return graphs == "auto"     ? GraphMode::kAuto
         : graphs == "always" ? GraphMode::kAlways
                              : GraphMode::kNever;
}

}  // namespace

ShampooHyperparameters hyperparameters(const ShampooOptions& o) {
  const auto [beta1, beta2] = o.betas();
  ShampooHyperparameters h;
  h.eps = o.eps();
  h.update_freq = o.update_freq();
  h.weight_decay = o.weight_decay();
  h.beta1 = beta1;
  h.beta2 = beta2;
  h.momentum = o.momentum();
  h.nesterov = o.nesterov();
  h.decoupled_weight_decay = o.decoupled_weight_decay();
  h.relative_eps = o.relative_eps();
  h.block_size = o.block_size();
  h.merge_dims = o.merge_dims();
  h.exponent = o.exponent();
  h.exponent_warmup = o.exponent_warmup();
  h.preconditioner_1d = o.preconditioner_1d();
  h.preconditioned = o.preconditioned();
  h.max_preconditioned_dim = o.max_preconditioned_dim();
  h.grafting = o.grafting();
  h.grafting_eps = o.grafting_eps();
  h.grafting_beta2 = o.grafting_beta2().value_or(beta2 == 1.0 ? 0.999 : beta2);
  h.start_preconditioning_step = o.start_preconditioning_step();
  h.root_method = o.root_method();
  h.root_dtype = o.root_dtype();
  h.matmul_precision = o.matmul_precision();
  h.maximize = o.maximize();
  h.capturable = o.capturable();
  return h;
}

void ShampooPlan::set_options(const torch::optim::OptimizerOptions& options) {
  const auto& o = static_cast<const ShampooOptions&>(options);
  hyperparameters_ = hyperparameters(o);
  forget_graphs(graph_mode(o.graphs()));
  auto* step = static_cast<ShampooStep*>(planned());
  if (step != nullptr && !step->adopt(hyperparameters_)) {
    forget_planned();
  }
}

std::unique_ptr<PlannedStep> ShampooPlan::plan(const std::vector<at::Tensor>& params,
                                               const StateList& states, at::Tensor status) {
  return std::make_unique<ShampooStep>(hyperparameters_, params,
                                       core_state(hyperparameters_, states, std::move(status)));
}

void ShampooPlan::renew_roots(const std::vector<at::Tensor>& params, const StateList& states,
                              at::Tensor status) {
  ShampooState state = core_state(hyperparameters_, states, std::move(status));
  shampoo_update_preconditioners(hyperparameters_, params, state);
}

}  // namespace torchium::optim::detail
