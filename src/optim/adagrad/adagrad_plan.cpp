#include "optim/adagrad/adagrad_plan.h"

#include "optim/adagrad/adagrad_step.h"

#include <ATen/ATen.h>

#include <utility>

namespace torchium::optim::detail {

// Statistics initial_accumulator_value * I, identity roots.
BlockStorage AdagradPlan::init_storage(at::TensorList params) const {
  if (!options_.full_matrix()) {
    return {};
  }
  BlockStorage storage =
      make_block_storage(params, adagrad_blockings(params, options_.block_size()));
  for (at::Tensor& statistics : storage.statistics) {
    statistics.diagonal(0, 1, 2).fill_(options_.initial_accumulator_value());
  }
  return storage;
}

void AdagradPlan::init_elementwise(const at::Tensor& param, ParameterState& state) const {
  if (!options_.full_matrix()) {
    state.sum = parameter_shaped_zeros(param).fill_(options_.initial_accumulator_value());
  }
}

std::unique_ptr<PlannedStep> AdagradPlan::plan(const std::vector<at::Tensor>& params,
                                               const StateList& states, at::Tensor status) {
  return std::make_unique<AdagradStep>(options_, AdagradGroup{params, states, std::move(status)});
}

}  // namespace torchium::optim::detail
