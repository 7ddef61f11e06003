#include "optim/shampoo/shampoo_plan.h"

#include <string>
#include <utility>

namespace torchium::optim::detail {
namespace {

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
                                               const std::vector<ParameterState>& states,
                                               at::Tensor status) {
  return std::make_unique<ShampooStep>(hyperparameters_, params, states, std::move(status));
}

void ShampooPlan::renew_roots(const std::vector<at::Tensor>& params,
                              const std::vector<ParameterState>& states, at::Tensor status) {
  shampoo_update_preconditioners(hyperparameters_, params, states, std::move(status));
}

}  // namespace torchium::optim::detail
