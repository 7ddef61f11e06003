// Shampoo's plan for one parameter group on one device.
#pragma once

#include "optim/blocked/blocked_plan.h"
#include "optim/shampoo/shampoo_options.h"
#include "optim/shampoo/shampoo_rules.h"
#include "torchium/optim/shampoo.h"

namespace torchium::optim::detail {

class ShampooPlan : public BlockedPlanOf<ShampooOptions> {
 public:
  explicit ShampooPlan(c10::Device device, Role role = Role::kParameter)
      : BlockedPlanOf(device), role_(role) {}

  const char* optimizer_name() const override { return "Shampoo"; }
  bool host_decides() const override { return !options_.capturable(); }
  Rule rule(at::IntArrayRef shape) const override;

 protected:
  std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params, const StateList& states,
                                    at::Tensor status) override;
  void renew_roots(const std::vector<at::Tensor>& params, const StateList& states,
                   at::Tensor status) override;

  double l2_penalty() const override { return detail::l2_penalty(options_); }
  BlockStorage init_storage(at::TensorList params) const override;
  void init_elementwise(const at::Tensor& param, ParameterState& state) const override;
  bool needs_buffer(const StateBuffer& buffer) const override;
  bool restarts(const StateBuffer& buffer, const Options& before) const override;
  void check_saved_rule(const at::Tensor& param, const ParameterState& saved,
                        const std::string& name) const override;

 private:
  Role role_;  // of its parameters
};

}  // namespace torchium::optim::detail
