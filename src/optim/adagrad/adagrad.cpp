#include "torchium/optim/adagrad.h"

#include "optim/adagrad/adagrad_options.h"
#include "optim/adagrad/adagrad_plan.h"
#include "optim/blocked/blocked_plans.h"

#include <utility>

namespace torchium::optim {

AdagradOptions::AdagradOptions(double lr) : lr_(lr) {}

template struct OptionsOf<AdagradOptions>;

std::unique_ptr<torch::optim::OptimizerParamState> AdagradParamState::clone() const {
  return std::make_unique<AdagradParamState>(*this);
}

std::vector<SecondOrderParamState::NamedTensor> AdagradParamState::parameter_shaped() {
  return {{"sum", &sum()}};
}

bool AdagradParamState::consists_of(const detail::ParameterState& tensors) const {
  return MatrixParamState::consists_of(tensors) && sum().is_same(tensors.sum);
}

Adagrad::Adagrad(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 AdagradOptions defaults)
    : BlockedOptimizer(std::make_unique<AdagradOptions>(std::move(defaults))) {
  initialize(param_groups);
}

Adagrad::Adagrad(std::vector<at::Tensor> params, AdagradOptions defaults)
    : Adagrad({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

std::unique_ptr<SecondOrderParamState> Adagrad::make_empty_state() const {
  return std::make_unique<AdagradParamState>();
}

c10::intrusive_ptr<detail::BlockedPlans> Adagrad::make_plans() const {
  return detail::make_blocked_plans<detail::AdagradPlan>(name());
}

}  // namespace torchium::optim
