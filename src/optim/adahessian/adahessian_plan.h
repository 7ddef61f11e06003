// AdaHessian's plans: one for each parameter group and device, and all of them, which estimate the
// diagonal of the Hessian together.
#pragma once

#include "optim/adahessian/adahessian_options.h"
#include "optim/adahessian/adahessian_step.h"
#include "optim/adahessian/hessian_diagonal.h"
#include "optim/blocked/blocked_plan.h"
#include "optim/blocked/blocked_plans.h"
#include "torchium/optim/adahessian.h"

#include <cstddef>
#include <memory>
#include <vector>

namespace torchium::optim::detail {

class AdaHessianPlan : public BlockedPlanOf<AdaHessianOptions> {
 public:
  using BlockedPlanOf::BlockedPlanOf;

  const char* optimizer_name() const override { return "AdaHessian"; }
  bool host_decides() const override { return true; }  // on the schedule of estimates

  // Positions among the parameters with a gradient whose estimate is due in the planned step.
  std::vector<size_t> due();
  DiagonalRequest request(size_t position) const;
  // One per parameter with a gradient; undefined: none.
  void set_diagonals(std::vector<at::Tensor> diagonals);
  size_t active_count() const { return active().size(); }

 protected:
  std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params, const StateList& states,
                                    at::Tensor status) override;

  double l2_penalty() const override { return 0.0; }
  BlockStorage init_storage(at::TensorList) const override { return {}; }
  void init_elementwise(const at::Tensor& param, ParameterState& state) const override;
  bool needs_buffer(const StateBuffer& buffer) const override {
    return buffer.tensor == &ParameterState::exp_avg;
  }
};

class AdaHessianPlans : public BlockedPlans {
 public:
  AdaHessianPlans();

 protected:
  void check_first_gradients(const std::vector<at::Tensor>& params) const override;
  void before_step() override;

 private:
  // Warns once of parameters whose diagonal is 0 because their gradient has no graph.
  void warn_of_lost_graphs(const std::vector<DiagonalRequest>& requests);

  bool has_warned_ = false;
};

}  // namespace torchium::optim::detail
