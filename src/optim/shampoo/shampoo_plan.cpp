#include "optim/shampoo/shampoo_plan.h"

#include "optim/shampoo/shampoo_options.h"
#include "optim/shampoo/shampoo_rules.h"

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

void ShampooPlan::set_options(const Options& options) {
  options_ = static_cast<const ShampooOptions&>(options);
  hyperparameters_ = hyperparameters(options_);
  forget_graphs(graph_mode(options_.graphs()));
  auto* step = static_cast<ShampooStep*>(planned());
  if (step != nullptr && !step->adopt(hyperparameters_)) {
    forget_planned();
  }
}

std::unique_ptr<PlannedStep> ShampooPlan::plan(const std::vector<at::Tensor>& params,
                                               const StateList& states, at::Tensor status) {
  return std::make_unique<ShampooStep>(hyperparameters_, params, states, std::move(status));
}

OptionTexts ShampooPlan::options_of_state(const Options& options) const {
  return detail::options_of_state(static_cast<const ShampooOptions&>(options));
}

BlockStorage ShampooPlan::init_storage(at::TensorList params) const {
  return shampoo_init_state(hyperparameters_, params);
}

void ShampooPlan::init_elementwise(const at::Tensor& param, ParameterState& state) const {
  if (rule_of_shape(hyperparameters_, param.sizes()) == ParameterRule::kDiagonal) {
    state.diagonal = parameter_shaped_zeros(param);
  }
}

bool ShampooPlan::needs_buffer(const StateBuffer& buffer) const {
  return buffer.tensor == &ParameterState::exp_avg ? hyperparameters_.beta1 > 0.0
         : buffer.tensor == &ParameterState::grafting_second_moment
             ? uses_second_moment(hyperparameters_)
             : hyperparameters_.momentum > 0.0;
}

// A sum of squares is no average of them.
bool ShampooPlan::begins_afresh(const StateBuffer& buffer, const Options& before) const {
  const bool summed = static_cast<const ShampooOptions&>(before).grafting() == "adagrad";
  return buffer.tensor == &ParameterState::grafting_second_moment &&
         summed != (options_.grafting() == "adagrad");
}

BlockedPlan::Rule ShampooPlan::rule(at::IntArrayRef shape) const {
  const RuleText text = describe_rule(hyperparameters_, shape);
  return {text.rule, text.detail};
}

void ShampooPlan::check_saved_rule(const at::Tensor& param, const ParameterState& saved,
                                   const std::string& name) const {
  const ParameterRule rule = rule_of_shape(hyperparameters_, param.sizes());
  const std::string detail = describe_rule(hyperparameters_, param.sizes()).detail;
  const bool has_matrices = !saved.statistics.empty();
  TORCH_CHECK_VALUE(
      !has_matrices || rule == ParameterRule::kMatrices, "unexpected matrices in the state of ",
      name, ", which none precondition by the options of its group (", detail,
      "); set them back, for a checkpoint of an earlier version preconditioned=True and "
      "max_preconditioned_dim=None");
  TORCH_CHECK_VALUE(
      has_matrices || rule != ParameterRule::kMatrices, "matrices are missing from the state of ",
      name,
      ", which are to precondition it by the options of its group; set back preconditioned, "
      "max_preconditioned_dim and preconditioner_1d, which cannot change after its first step");
  TORCH_CHECK_VALUE(rule != ParameterRule::kGrafted || saved.grafting_second_moment.defined(),
                    "grafting_second_moment is missing from the state of ", name,
                    ", which takes the direction of grafting=", text_of(options_.grafting()),
                    " by the options of its group (", detail, ")");
}

void ShampooPlan::renew_roots(const std::vector<at::Tensor>& params, const StateList& states,
                              at::Tensor status) {
  shampoo_update_preconditioners(hyperparameters_, params, states, std::move(status));
}

}  // namespace torchium::optim::detail
