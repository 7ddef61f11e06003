// Adagrad's plan of the steps of one parameter group on one device.
#pragma once

#include "optim/adagrad/adagrad_step.h"
#include "optim/core/step_plan.h"
#include "torchium/optim/adagrad.h"

namespace torchium::optim::detail {

// What the core works with, without the learning rate.
AdagradHyperparameters hyperparameters(const AdagradOptions& options);

class AdagradPlan : public StepPlan {
 public:
  using StepPlan::StepPlan;

  void set_options(const torch::optim::OptimizerOptions& options) override;
  bool host_decides() const override { return hyperparameters_.full_matrix; }

 protected:
  std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params,
                                    const std::vector<ParameterState>& states,
                                    at::Tensor status) override;

 private:
  AdagradHyperparameters hyperparameters_;
};

}  // namespace torchium::optim::detail
