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
                                               const std::vector<ParameterState>& states,
                                               at::Tensor status) {
  return std::make_unique<AdagradStep>(hyperparameters_,
                                       AdagradGroup{params, states, std::move(status)});
}

}  // namespace torchium::optim::detail
