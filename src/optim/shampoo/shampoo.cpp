#include "torchium/optim/shampoo.h"

#include "gradients/capture/model_layers.h"
#include "optim/blocked/blocked_plans.h"
#include "optim/core/model_groups.h"
#include "optim/shampoo/shampoo_options.h"
#include "optim/shampoo/shampoo_plan.h"
#include "optim/shampoo/shampoo_sharing.h"

#include <utility>

namespace torchium::optim {

ShampooOptions::ShampooOptions(double lr) : lr_(lr) {}

template struct OptionsOf<ShampooOptions>;

std::unique_ptr<torch::optim::OptimizerParamState> ShampooParamState::clone() const {
  return std::make_unique<ShampooParamState>(*this);
}

bool ShampooParamState::consists_of(const detail::ParameterState& tensors) const {
  return MatrixParamState::consists_of(tensors) && diagonal().is_same(tensors.diagonal) &&
         exp_avg().is_same(tensors.exp_avg) && exp_avg_start().is_same(tensors.exp_avg_start) &&
         grafting_second_moment().is_same(tensors.grafting_second_moment) &&
         grafting_second_moment_start().is_same(tensors.grafting_second_moment_start) &&
         momentum_buffer().is_same(tensors.momentum_buffer);
}

std::vector<SecondOrderParamState::NamedTensor> ShampooParamState::parameter_shaped() {
  return {{"diagonal", &diagonal()},
          {"exp_avg", &exp_avg()},
          {"grafting_second_moment", &grafting_second_moment()},
          {"momentum_buffer", &momentum_buffer()}};
}

std::vector<SecondOrderParamState::NamedTensor> ShampooParamState::counts() {
  return {{"exp_avg_start", &exp_avg_start()},
          {"grafting_second_moment_start", &grafting_second_moment_start()}};
}

Shampoo::Shampoo(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 ShampooOptions defaults)
    : BlockedOptimizer(std::make_unique<ShampooOptions>(std::move(defaults))) {
  initialize(param_groups);
}

Shampoo::Shampoo(std::vector<at::Tensor> params, ShampooOptions defaults)
    : Shampoo({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

Shampoo::Shampoo(const torch::nn::Module& model, ShampooOptions defaults)
    : BlockedOptimizer(std::make_unique<ShampooOptions>(defaults)),
      layers_(std::make_shared<gradients::detail::ModelLayers>(model)) {
  initialize(detail::model_groups(model, defaults));
}

std::unique_ptr<SecondOrderParamState> Shampoo::make_empty_state() const {
  return std::make_unique<ShampooParamState>();
}

std::string Shampoo::name_in_model(const at::Tensor& param) const {
  const auto* place = layers_ && param.defined() ? layers_->find(param) : nullptr;
  return place != nullptr ? place->name : "";
}

c10::intrusive_ptr<detail::BlockedPlans> Shampoo::make_plans() const {
  const ShampooOptions& options = detail::options_as<ShampooOptions>(defaults(), name());
  if (options.ranks() != nullptr) {
    return detail::make_shared_shampoo_plans(*options.ranks(),
                                             {options.comm_dtype(), options.bucket_bytes()});
  }
  return detail::make_blocked_plans<detail::ShampooPlan>(name());
}

void Shampoo::update_preconditioners() { renew_all_roots(); }

void Shampoo::sync_lr() { sync_learning_rates(); }

ShampooReport Shampoo::report() const { return plans().report(groups()); }

int64_t Shampoo::max_root_failures(const Options& options) const {
  return detail::options_as<ShampooOptions>(options, name()).max_root_failures();
}

}  // namespace torchium::optim
