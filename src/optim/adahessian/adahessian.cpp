#include "torchium/optim/adahessian.h"

#include "optim/adahessian/adahessian_options.h"
#include "optim/adahessian/adahessian_plan.h"

#include <utility>

namespace torchium::optim {
namespace {

const AdaHessianOptions& adahessian_options(const torch::optim::OptimizerOptions& options) {
  const auto* result = dynamic_cast<const AdaHessianOptions*>(&options);
  TORCH_CHECK_VALUE(result != nullptr, "a parameter group of AdaHessian needs AdaHessianOptions");
  return *result;
}

}  // namespace

AdaHessianOptions::AdaHessianOptions(double lr) : lr_(lr) {}

double AdaHessianOptions::get_lr() const { return lr(); }
void AdaHessianOptions::set_lr(const double lr) { this->lr(lr); }

void AdaHessianOptions::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(archive, *this);
}
void AdaHessianOptions::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(archive, *this);
}

bool operator==(const AdaHessianOptions& lhs, const AdaHessianOptions& rhs) {
  return detail::equal_options(lhs, rhs);
}

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

void AdaHessian::check_options(const Options& options) const {
  detail::check_options(adahessian_options(options));
}

std::unique_ptr<SecondOrderParamState> AdaHessian::make_empty_state() const {
  return std::make_unique<AdaHessianParamState>();
}

bool AdaHessian::equal_but_lr(const Options& a, const Options& b) const {
  return detail::equal_but_lr(adahessian_options(a), adahessian_options(b));
}

c10::intrusive_ptr<detail::BlockedPlans> AdaHessian::make_plans() const {
  return c10::make_intrusive<detail::AdaHessianPlans>();
}

}  // namespace torchium::optim
