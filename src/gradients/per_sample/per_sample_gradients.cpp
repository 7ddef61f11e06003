#include "gradients/per_sample/sample_evaluation.h"
#include "gradients/per_sample/sample_values.h"
#include "torchium/gradients.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <vector>

namespace torchium {

torch::OrderedDict<std::string, at::Tensor> per_sample_gradients(
    const torch::nn::Module& model, const ForwardFunction& forward, const LossFunction& loss_fn,
    const at::Tensor& inputs, const at::Tensor& targets, int64_t max_workspace_bytes) {
  gradients::detail::check_workspace(max_workspace_bytes);
  const gradients::detail::SampleLoss loss(model, forward, loss_fn, inputs, targets);
  const gradients::detail::TrainableParameters trainable(model);
  const auto& params = trainable.params;
  std::vector<at::Tensor> rows(params.size());
  const auto set_zero = [&](size_t p) {
    auto shape = params[p].sizes().vec();
    shape.insert(shape.begin(), loss.samples());
    rows[p] = at::zeros(shape, params[p].options().requires_grad(false));
  };
  gradients::detail::evaluate(
      "per_sample_gradients", loss, trainable,
      [&](const gradients::detail::Jacobian& jacobian) {
        rows = jacobian.rows(max_workspace_bytes);
      },
      [&](int64_t i, const std::vector<at::Tensor>& of_sample) {
        for (const auto p : c10::irange(params.size())) {
          if (!of_sample[p].defined()) {
            continue;
          }
          if (!rows[p].defined()) {
            set_zero(p);
          }
          rows[p][i].copy_(of_sample[p]);
        }
      });
  torch::OrderedDict<std::string, at::Tensor> result;
  for (const auto p : c10::irange(params.size())) {
    if (!rows[p].defined()) {
      set_zero(p);
    }
    result.insert(trainable.names[p], rows[p].to(params[p].scalar_type()));
  }
  return result;
}

}  // namespace torchium
