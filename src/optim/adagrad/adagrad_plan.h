// Adagrad's plan for one parameter group on one device.
#pragma once

#include "optim/blocked/blocked_plan.h"
#include "torchium/optim/adagrad.h"

namespace torchium::optim::detail {

class AdagradPlan : public BlockedPlan {
 public:
  using BlockedPlan::BlockedPlan;

  const char* optimizer_name() const override { return "Adagrad"; }
  bool host_decides() const override { return options_.full_matrix(); }

 protected:
  std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params, const StateList& states,
                                    at::Tensor status) override;

  const Options& options() const override { return options_; }
  void adopt(const Options& options) override {
    options_ = static_cast<const AdagradOptions&>(options);
  }
  double l2_penalty() const override { return options_.weight_decay(); }
  OptionTexts options_of_state(const Options& options) const override;
  BlockStorage init_storage(at::TensorList params) const override;
  void init_elementwise(const at::Tensor& param, ParameterState& state) const override;

 private:
  AdagradOptions options_;
};

}  // namespace torchium::optim::detail
