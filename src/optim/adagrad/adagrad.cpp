#include "torchium/optim/adagrad.h"

#include "optim/adagrad/adagrad_options.h"
#include "optim/adagrad/adagrad_plan.h"
#include "optim/blocked/blocked_plans.h"

#include <utility>

namespace torchium::optim {
namespace {

const AdagradOptions& adagrad_options(const torch::optim::OptimizerOptions& options) {
  const auto* result = dynamic_cast<const AdagradOptions*>(&options);
  TORCH_CHECK_VALUE(result != nullptr, "a parameter group of Adagrad needs AdagradOptions");
  return *result;
}

}  // namespace

AdagradOptions::AdagradOptions(double lr) : lr_(lr) {}

double AdagradOptions::get_lr() const { return lr(); }
void AdagradOptions::set_lr(const double lr) { this->lr(lr); }

void AdagradOptions::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(archive, *this);
}
void AdagradOptions::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(archive, *this);
}

bool operator==(const AdagradOptions& lhs, const AdagradOptions& rhs) {
  return detail::equal_options(lhs, rhs);
}

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

void Adagrad::check_options(const Options& options) const {
  detail::check_options(adagrad_options(options));
}

std::unique_ptr<SecondOrderParamState> Adagrad::make_empty_state() const {
  return std::make_unique<AdagradParamState>();
}

bool Adagrad::equal_but_lr(const Options& a, const Options& b) const {
  return detail::equal_but_lr(adagrad_options(a), adagrad_options(b));
}

c10::intrusive_ptr<detail::BlockedPlans> Adagrad::make_plans() const {
  return detail::make_blocked_plans<detail::AdagradPlan>(name());
}

}  // namespace torchium::optim
