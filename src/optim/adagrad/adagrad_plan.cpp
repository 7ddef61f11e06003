#include "optim/adagrad/adagrad_plan.h"

#include <utility>

namespace torchium::optim::detail {

AdagradHyperparameters hyperparameters(const AdagradOptions& o) {
  return {.lr_decay = o.lr_decay(),
          .weight_decay = o.weight_decay(),
          .eps = o.eps(),
          .full_matrix = o.full_matrix(),
          .block_size = o.block_size(),
          .update_freq = o.update_freq(),
          .root_method = o.root_method(),
          .maximize = o.maximize()};
}

void AdagradPlan::set_options(const torch::optim::OptimizerOptions& options) {
  hyperparameters_ = hyperparameters(static_cast<const AdagradOptions&>(options));
  auto* step = static_cast<AdagradStep*>(planned());
  if (step != nullptr && !step->adopt(hyperparameters_)) {
    forget_planned();
  }
}

std::unique_ptr<PlannedStep> AdagradPlan::plan(const std::vector<at::Tensor>& params,
                                               const StateList& states, at::Tensor status) {
  using State = ParameterState;
  AdagradState state{.steps = list_of(states, &State::step),
                     .sums = defined_list_of(states, &State::sum),
                     .statistics = slots_of(states, &State::statistics),
                     .roots = slots_of(states, &State::roots),
                     .root_failures = slots_of(states, &State::root_failures),
                     .status = std::move(status)};
  return std::make_unique<AdagradStep>(hyperparameters_, params, std::move(state));
}

}  // namespace torchium::optim::detail
