#include "optim/adagrad/adagrad_plan.h"

#include "optim/adagrad/adagrad_options.h"

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

void AdagradPlan::set_options(const Options& options) {
  options_ = static_cast<const AdagradOptions&>(options);
  hyperparameters_ = hyperparameters(options_);
  auto* step = static_cast<AdagradStep*>(planned());
  if (step != nullptr && !step->adopt(hyperparameters_)) {
    forget_planned();
  }
}

OptionTexts AdagradPlan::options_of_state(const Options& options) const {
  return detail::options_of_state(static_cast<const AdagradOptions&>(options));
}

BlockStorage AdagradPlan::init_storage(at::TensorList params) const {
  return options_.full_matrix() ? adagrad_init_state(params, options_.block_size(),
                                                     options_.initial_accumulator_value())
                                : BlockStorage();
}

void AdagradPlan::init_elementwise(const at::Tensor& param, ParameterState& state) const {
  if (!options_.full_matrix()) {
    state.sum = parameter_shaped_zeros(param).fill_(options_.initial_accumulator_value());
  }
}

std::unique_ptr<PlannedStep> AdagradPlan::plan(const std::vector<at::Tensor>& params,
                                               const StateList& states, at::Tensor status) {
  return std::make_unique<AdagradStep>(hyperparameters_,
                                       AdagradGroup{params, states, std::move(status)});
}

}  // namespace torchium::optim::detail
