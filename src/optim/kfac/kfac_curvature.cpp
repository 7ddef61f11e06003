// The factors G of K-FAC from the curvature of the loss instead of its gradients.
#include "optim/kfac/kfac_plan.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

bool KfacPlan::takes_curvature() const {
  return !options().empty() && options().front().fisher() != "empirical";
}

void KfacPlan::record_curvature(const at::Tensor& outputs, const LossCurvature& curvature,
                                std::vector<gradients::detail::DifferentiableCall> calls) {
  const std::lock_guard lock(curvature_mutex_);
  const int64_t micro_batch = curvature_batches_++;
  std::erase_if(calls, [&](const auto& call) { return !is_due(call.layer); });
  torch::autograd::edge_list edges;
  for (const auto& call : calls) {
    edges.push_back(call.output);
  }
  try {
    for (int64_t k = 0; k < curvature.columns() && !calls.empty(); ++k) {
      // g = J^T v of each sample: sum over columns of g g^T = J^T H J
      const auto gradients = gradients::detail::gradients_at(edges, outputs, curvature.column(k),
                                                             /*keep_graph=*/true);
      const CurvatureColumn column{curvature.samples(), /*is_first=*/k == 0};
      for (const auto i : c10::irange(calls.size())) {
        if (gradients[i].defined()) {
          gradients::detail::LayerCall call = calls[i].layer;
          call.micro_batch = micro_batch;
          call.output_gradient = gradients[i].detach().reshape(calls[i].output_sizes);
          add_to_sums(std::move(call), calls[i].is_tied, {}, &column);
        }
      }
    }
  } catch (...) {
    forget();
    throw;
  }
}

void KfacPlan::require_curvature(const std::vector<size_t>& active) {
  if (!takes_curvature() || curvature_batches_ > 0) {
    return;
  }
  const bool any_due =
      std::any_of(active.begin(), active.end(), [&](size_t i) { return due()[i]; });
  TORCH_CHECK(!any_due || only_creates_state(), optimizer_name(), " with fisher='",
              options().front().fisher(),
              "' updates its factors in this step, but update_curvature() was not called: call it "
              "with the outputs of the model in each iteration, after zero_grad() and before "
              "step()");
}

}  // namespace torchium::optim::detail
