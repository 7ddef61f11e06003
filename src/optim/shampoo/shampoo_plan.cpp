#include "optim/shampoo/shampoo_plan.h"

#include "optim/core/step_prologue.h"
#include "optim/shampoo/shampoo_step.h"

#include <numeric>
#include <string>
#include <utility>

namespace torchium::optim::detail {

std::unique_ptr<PlannedStep> ShampooPlan::plan(const std::vector<at::Tensor>& params,
                                               const StateList& states, at::Tensor status) {
  return std::make_unique<ShampooStep>(options_, role_, params, states, updates(),
                                       std::move(status));
}

BlockStorage ShampooPlan::init_storage(at::TensorList params) const {
  return make_block_storage(params, make_blockings(options_, params, role_), options_.root_dtype());
}

void ShampooPlan::init_elementwise(const at::Tensor& param, ParameterState& state) const {
  if (rule_of_shape(options_, param.sizes(), role_) == ParameterRule::kDiagonal) {
    state.diagonal = parameter_shaped_zeros(param);
  }
}

bool ShampooPlan::needs_buffer(const StateBuffer& buffer) const {
  return buffer.tensor == &ParameterState::exp_avg                  ? beta1(options_) > 0.0
         : buffer.tensor == &ParameterState::grafting_second_moment ? uses_second_moment(options_)
                                                                    : options_.momentum() > 0.0;
}

// A sum of squares is not an average.
bool ShampooPlan::restarts(const StateBuffer& buffer, const Options& before) const {
  const bool summed = static_cast<const ShampooOptions&>(before).grafting() == "adagrad";
  return buffer.tensor == &ParameterState::grafting_second_moment &&
         summed != (options_.grafting() == "adagrad");
}

BlockedPlan::Rule ShampooPlan::rule(at::IntArrayRef shape) const {
  return describe_rule(options_, shape);
}

void ShampooPlan::check_saved_rule(const at::Tensor& param, const ParameterState& saved,
                                   const std::string& name) const {
  const ParameterRule rule = rule_of_shape(options_, param.sizes());
  const bool needs_matrices =
      rule == ParameterRule::kMatrices && shampoo_blocking(options_, param.sizes()).order() > 0;
  const std::string detail = describe_rule(options_, param.sizes()).detail;
  const bool has_matrices = !saved.statistics.empty();
  TORCH_CHECK_VALUE(
      !has_matrices || needs_matrices, "unexpected matrices in the state of ", name,
      ", which none precondition by the options of its group (", detail,
      "); set them back, for a checkpoint of an earlier version preconditioned=True and "
      "max_preconditioned_dim=None");
  TORCH_CHECK_VALUE(
      has_matrices || !needs_matrices, "matrices are missing from the state of ", name,
      ", which are to precondition it by the options of its group; set back preconditioned, "
      "max_preconditioned_dim and preconditioner_1d, which cannot change after its first step");
  TORCH_CHECK_VALUE(rule != ParameterRule::kGrafted || saved.grafting_second_moment.defined(),
                    "grafting_second_moment is missing from the state of ", name,
                    ", which takes the direction of grafting=", text_of(options_.grafting()),
                    " by the options of its group (", detail, ")");
}

void ShampooPlan::renew_roots(const std::vector<at::Tensor>& params, const StateList& states,
                              at::Tensor status) {
  const auto blockings = make_blockings(options_, params, role_);
  std::vector<size_t> all(params.size());
  std::iota(all.begin(), all.end(), 0);
  auto batches = find_batches(blockings, states, all);
  std::vector<StepScalar> c;
  for (const ParameterState& state : states) {
    c.push_back(bias_correction(beta2(options_), state.step, {}));
  }
  const std::vector<int64_t> due_steps(params.size(), kLateStep);
  update_roots(batches, root_rule(options_), due_steps, c, FoundInfGuard::open());
  record_root_failures(batches, status);
}

}  // namespace torchium::optim::detail
