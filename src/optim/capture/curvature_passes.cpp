#include "optim/capture/curvature_passes.h"

#include "gradients/capture/capture_state.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace torchium::optim::detail {

void check_origin(const at::Tensor& outputs, const char* optimizer,
                  const std::vector<gradients::detail::DifferentiableCall>& calls,
                  const std::function<bool(const at::Tensor&)>& is_known) {
  if (!calls.empty()) {
    return;
  }
  const auto nodes = gradients::detail::nodes_of(outputs);
  const bool is_own = std::any_of(nodes.begin(), nodes.end(), [&](const auto* node) {
    const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    return leaf != nullptr && is_known(leaf->variable);
  });
  TORCH_CHECK_VALUE(is_own, "outputs ", outputs.sizes(), " do not depend on any parameter of this ",
                    optimizer,
                    "; pass what its own model has returned, not within "
                    "torch.utils.checkpoint with use_reentrant=True");
}

std::string several_rows_message(int64_t rows, const at::Tensor& outputs, const std::string& name) {
  return c10::str("outputs ", outputs.sizes(), " have ", outputs.size(0),
                  " samples, but the layer of ", name, " has seen ", rows,
                  " in dimension 0 of its input, and fisher='ggn' would mix the outputs of one of "
                  "them; pass outputs [",
                  rows,
                  ", ...], with class_dim for classes, or use "
                  "fisher='mc'");
}

CurvatureBatch CurvatureBatches::add(
    const std::vector<gradients::detail::DifferentiableCall>& calls, int64_t samples) {
  const auto shared = std::find_if(calls.begin(), calls.end(), [&](const auto& each) {
    return calls_.count(Call(each.call)) != 0;
  });
  CurvatureBatch batch{size_, samples};
  if (shared == calls.end()) {
    ++size_;
    samples_ += samples;
  } else {
    batch = calls_.at(Call(shared->call)).batch;
    batch.scale = std::sqrt(static_cast<double>(batch.samples) / static_cast<double>(samples));
  }
  for (const auto& each : calls) {
    calls_.try_emplace(Call(each.call), Known{batch});
  }
  return batch;
}

bool CurvatureBatches::is_first_visit(const gradients::detail::DifferentiableCall& call) {
  return !std::exchange(calls_.at(Call(call.call)).is_visited, true);
}

void for_each_curvature_gradient(
    const at::Tensor& outputs, const LossCurvature& curvature, double scale,
    const std::vector<gradients::detail::DifferentiableCall>& calls,
    const std::function<void(int64_t, size_t, gradients::detail::LayerCall)>& visit) {
  if (calls.empty()) {
    return;
  }
  torch::autograd::edge_list edges;
  for (const auto& call : calls) {
    edges.push_back(call.output);
  }
  for (int64_t k = 0; k < curvature.columns(); ++k) {
    const at::Tensor column = curvature.column(k);
    const auto gradients = gradients::detail::gradients_at(
        edges, outputs, scale == 1.0 ? column : column * scale, /*keep_graph=*/true);
    for (const auto i : c10::irange(calls.size())) {
      if (gradients[i].defined()) {
        gradients::detail::LayerCall call = calls[i].layer;
        const gradients::detail::PendingCall& pending = *calls[i].call;
        const at::Tensor gradient = gradients[i].detach().reshape(pending.output_sizes);
        call.output_gradient = gradients::detail::core_gradient(
            pending, gradients::detail::with_samples_first(pending, gradient));
        visit(k, i, std::move(call));
      }
    }
  }
}

}  // namespace torchium::optim::detail
