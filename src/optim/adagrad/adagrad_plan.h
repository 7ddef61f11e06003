// Adagrad's plan of the steps of one parameter group on one device.
#pragma once

#include "optim/adagrad/adagrad_step.h"
#include "optim/blocked/blocked_plan.h"
#include "torchium/optim/adagrad.h"

namespace torchium::optim::detail {

// What the core works with, without the learning rate.
AdagradHyperparameters hyperparameters(const AdagradOptions& options);

class AdagradPlan : public BlockedPlan {
 public:
  using BlockedPlan::BlockedPlan;

  void set_options(const Options& options) override;
  bool host_decides() const override { return hyperparameters_.full_matrix; }

 protected:
  std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params, const StateList& states,
                                    at::Tensor status) override;

  const Options& options() const override { return options_; }
  OptionTexts options_of_state(const Options& options) const override;
  BlockStorage init_storage(at::TensorList params) const override;
  void init_elementwise(const at::Tensor& param, ParameterState& state) const override;

 private:
  AdagradOptions options_;
  AdagradHyperparameters hyperparameters_;
};

}  // namespace torchium::optim::detail
