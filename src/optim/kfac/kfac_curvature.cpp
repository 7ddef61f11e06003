// The factors G of K-FAC from the curvature of the loss instead of its gradients.
#include "optim/kfac/kfac_plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

void KfacPlan::add_curvature(const at::Tensor& outputs, const LossCurvature& curvature,
                             std::vector<gradients::detail::DifferentiableCall> calls) {
  const int64_t micro_batch = curvature_batches_++;
  std::erase_if(calls, [&](const auto& call) { return !is_due(call.layer); });
  for_each_curvature_gradient(
      outputs, curvature, calls, [&](int64_t k, size_t i, gradients::detail::LayerCall call) {
        const CurvatureColumn column{curvature.samples(), /*is_first=*/k == 0};
        call.micro_batch = micro_batch;
        add_to_sums(std::move(call), &column);
      });
}

void KfacPlan::require_curvature(const std::vector<size_t>& active) {
  if (!takes_curvature() || curvature_batches_ > 0) {
    return;
  }
  const bool any_due =
      std::any_of(active.begin(), active.end(), [&](size_t i) { return due()[i]; });
  TORCH_CHECK(!any_due || only_creates_state(), optimizer_name(), " with fisher='", fisher(),
              "' updates its factors in this step, but update_curvature() was not called: call it "
              "with the outputs of the model in each iteration, after zero_grad() and before "
              "step()");
}

}  // namespace torchium::optim::detail
