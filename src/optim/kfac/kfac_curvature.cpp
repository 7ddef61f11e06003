// The factors G of K-FAC from the curvature of the loss instead of its gradients.
#include "optim/kfac/kfac_plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

void KfacPlan::add_curvature(const at::Tensor& outputs, const LossCurvature& curvature,
                             std::vector<gradients::detail::DifferentiableCall> calls) {
  const CurvatureBatch batch = curvature_batches_.add(calls, curvature.samples());
  std::erase_if(calls, [&](const auto& call) { return !is_due(call.layer); });
  for_each_curvature_gradient(
      outputs, curvature, batch.scale, calls,
      [&](int64_t /*k*/, size_t i, gradients::detail::LayerCall call) {
        check_curvature_rows(call, outputs, curvature);
        const CurvatureColumn column{batch.samples, curvature_batches_.is_first_visit(calls[i])};
        call.micro_batch = batch.number;
        add_to_sums(std::move(call), &column);
      });
}

// Sums over the positions of a row, before they are squared, would have cross terms of the outputs
// that a column of "ggn" mixes. One row for the whole batch has them in any case.
void KfacPlan::check_curvature_rows(const gradients::detail::LayerCall& call,
                                    const at::Tensor& outputs,
                                    const LossCurvature& curvature) const {
  const KFACOptions& o = options(call.weight);
  const auto rows = gradients::detail::samples_of(call).expect_int();
  const bool sums_positions = o.ekfac() || o.weight_sharing() == "reduce";
  const bool is_table = call.kind == gradients::detail::LayerKind::kEmbedding;
  TORCH_CHECK_VALUE(curvature.is_sampled() || !sums_positions || is_table || rows <= 1 ||
                        rows >= curvature.samples(),
                    several_rows_message(rows, outputs, name(call.weight)));
}

void KfacPlan::note_reached(const gradients::detail::LayerCall& call) {
  const std::lock_guard lock(records_mutex_);
  for (const int64_t i : {call.weight, call.bias}) {
    if (i >= 0 && i < static_cast<int64_t>(size())) {
      reached_.insert(param(i).unsafeGetTensorImpl());
    }
  }
}

bool KfacPlan::needs_curvature(const at::Tensor& param) const {
  return takes_curvature() && reached_.count(param.unsafeGetTensorImpl()) != 0;
}

void KfacPlan::require_curvature(const std::vector<size_t>& active) {
  if (!takes_curvature() || curvature_batches_.size() > 0) {
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
