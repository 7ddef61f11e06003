// Shampoo's plan of the steps of one parameter group on one device.
#pragma once

#include "optim/core/step_plan.h"
#include "optim/shampoo/shampoo_step.h"
#include "torchium/optim/shampoo.h"

namespace torchium::optim::detail {

// What the core works with, without the learning rate.
ShampooHyperparameters hyperparameters(const ShampooOptions& options);

class ShampooPlan : public StepPlan {
 public:
  using StepPlan::StepPlan;

  void set_options(const torch::optim::OptimizerOptions& options) override;
  bool host_decides() const override { return !hyperparameters_.capturable; }

 protected:
  std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params,
                                    const std::vector<ParameterState>& states,
                                    at::Tensor status) override;
  void renew_roots(const std::vector<at::Tensor>& params, const std::vector<ParameterState>& states,
                   at::Tensor status) override;

 private:
  ShampooHyperparameters hyperparameters_;
};

}  // namespace torchium::optim::detail
