#include "torchium/optim/adahessian.h"

#include "optim/adahessian/adahessian_options.h"
#include "optim/adahessian/adahessian_plan.h"

#include <utility>

namespace torchium::optim {

AdaHessianOptions::AdaHessianOptions(double lr) : lr_(lr) {}

template struct OptionsOf<AdaHessianOptions>;

std::unique_ptr<torch::optim::OptimizerParamState> AdaHessianParamState::clone() const {
  return std::make_unique<AdaHessianParamState>(*this);
}

std::vector<SecondOrderParamState::NamedTensor> AdaHessianParamState::parameter_shaped() {
  return {{"hessian_diagonal", &hessian_diagonal()},
          {"exp_avg", &exp_avg()},
          {"exp_hessian_diag_sq", &exp_hessian_diag_sq()}};
}

std::vector<SecondOrderParamState::NamedTensor> AdaHessianParamState::counts() {
  return {{"exp_avg_start", &exp_avg_start()}};
}

bool AdaHessianParamState::consists_of(const detail::ParameterState& tensors) const {
  return MatrixParamState::consists_of(tensors) &&
         hessian_diagonal().is_same(tensors.hessian_diagonal) &&
         exp_avg().is_same(tensors.exp_avg) && exp_avg_start().is_same(tensors.exp_avg_start) &&
         exp_hessian_diag_sq().is_same(tensors.exp_hessian_diag_sq);
}

AdaHessian::AdaHessian(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                       AdaHessianOptions defaults)
    : BlockedOptimizer(std::make_unique<AdaHessianOptions>(std::move(defaults))) {
  initialize(param_groups);
}

AdaHessian::AdaHessian(std::vector<at::Tensor> params, AdaHessianOptions defaults)
    : AdaHessian({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

std::unique_ptr<SecondOrderParamState> AdaHessian::make_empty_state() const {
  return std::make_unique<AdaHessianParamState>();
}

c10::intrusive_ptr<detail::BlockedPlans> AdaHessian::make_plans() const {
  return c10::make_intrusive<detail::AdaHessianPlans>();
}

}  // namespace torchium::optim
