// Adagrad's plan for one parameter group on one device.
#pragma once

#include "optim/adagrad/adagrad_options.h"
#include "optim/blocked/blocked_plan.h"
#include "torchium/optim/adagrad.h"

namespace torchium::optim::detail {

class AdagradPlan : public BlockedPlanOf<AdagradOptions> {
 public:
  using BlockedPlanOf::BlockedPlanOf;

  const char* optimizer_name() const override { return "Adagrad"; }
  bool host_decides() const override { return options_.full_matrix(); }

 protected:
  std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params, const StateList& states,
                                    at::Tensor status) override;

  double l2_penalty() const override { return options_.weight_decay(); }
  BlockStorage init_storage(at::TensorList params) const override;
  void init_elementwise(const at::Tensor& param, ParameterState& state) const override;
};

}  // namespace torchium::optim::detail
