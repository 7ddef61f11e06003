#include "optim/adahessian/adahessian_plan.h"

#include "support/phase.h"
#include "support/stream_capture.h"

#include <utility>

namespace torchium::optim::detail {

void AdaHessianPlan::init_elementwise(const at::Tensor& param, ParameterState& state) const {
  state.hessian_diagonal = parameter_shaped_zeros(param);
  state.exp_hessian_diag_sq = parameter_shaped_zeros(param);
}

std::unique_ptr<PlannedStep> AdaHessianPlan::plan(const std::vector<at::Tensor>& params,
                                                  const StateList& states, at::Tensor status) {
  return std::make_unique<AdaHessianStep>(options_, params, states, std::move(status));
}

std::vector<size_t> AdaHessianPlan::due() {
  const std::vector<int64_t> steps = known_steps(active());
  std::vector<size_t> positions;
  for (size_t k = 0; k < steps.size(); ++k) {
    if (steps[k] % options_.update_each() == 0) {
      positions.push_back(k);
    }
  }
  return positions;
}

DiagonalRequest AdaHessianPlan::request(size_t position) const {
  const at::Tensor& p = param(active()[position]);
  return {p, gradient_of(p), options_.n_samples()};
}

void AdaHessianPlan::set_diagonals(std::vector<at::Tensor> diagonals) {
  static_cast<AdaHessianStep&>(*planned()).set_diagonals(std::move(diagonals));
}

AdaHessianPlans::AdaHessianPlans()
    : BlockedPlans("AdaHessian", [](c10::Device device) -> c10::intrusive_ptr<BlockedPlan> {
        return c10::make_intrusive<AdaHessianPlan>(device);
      }) {}

void AdaHessianPlans::warn_of_lost_graphs(const std::vector<DiagonalRequest>& requests) {
  if (has_warned_) {
    return;
  }
  std::vector<at::Tensor> lost;
  for (const DiagonalRequest& request : requests) {
    if (lacks_curvature(request)) {
      lost.push_back(request.param);
    }
  }
  if (lost.empty()) {
    return;
  }
  has_warned_ = true;
  TORCH_WARN(
      "AdaHessian: the gradients of ", lost.size(), " of ", requests.size(),
      " parameters have no graph, the first of shape ", lost.front().sizes(),
      ": the diagonal of their Hessian counts as 0, and their steps are lr m / eps. The loss "
      "is linear in them, or a part of the backward pass kept no graph, as in "
      "torch.utils.checkpoint with use_reentrant=True: pass use_reentrant=False");
}

void AdaHessianPlans::check_first_gradients(const std::vector<at::Tensor>& params) const {
  std::vector<DiagonalRequest> requests;
  for (const at::Tensor& param : params) {
    requests.push_back({param, gradient_of(param), 1});
  }
  has_graphs(requests);
}

void AdaHessianPlans::before_step() {
  struct Due {
    AdaHessianPlan* plan;
    std::vector<size_t> positions;
  };
  std::vector<Due> all;
  std::vector<DiagonalRequest> requests;
  for (BlockedPlan* each : plans()) {
    auto* plan = static_cast<AdaHessianPlan*>(each);
    TORCH_CHECK(!torchium::detail::is_capturing(plan->device()),
                "AdaHessian cannot be captured in a CUDA graph: each step draws new signs");
    all.push_back({plan, plan->due()});
    for (const size_t position : all.back().positions) {
      requests.push_back(plan->request(position));
    }
  }
  if (requests.empty()) {
    return;
  }
  const torchium::detail::Phase phase("torchium::hessian_diagonal");
  std::vector<at::Tensor> diagonals = hessian_diagonals(requests, loss_scale());
  warn_of_lost_graphs(requests);
  auto next = diagonals.begin();
  for (const Due& due : all) {
    if (due.plan->active_count() == 0) {  // no step is planned
      continue;
    }
    std::vector<at::Tensor> of_plan(due.plan->active_count());
    for (const size_t position : due.positions) {
      of_plan[position] = std::move(*next++);
    }
    due.plan->set_diagonals(std::move(of_plan));
  }
}

}  // namespace torchium::optim::detail
