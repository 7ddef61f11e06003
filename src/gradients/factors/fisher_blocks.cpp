#include "gradients/factors/fisher_blocks.h"

#include "gradients/factors/device_norms.h"
#include "gradients/jacobian/dense_rows.h"
#include "support/phase.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace torchium::gradients::detail {

void update_fisher_blocks_(at::Tensor& sum, const LayerCall& call, at::IntArrayRef weight_shape,
                           bool accumulate, WeightSharing sharing) {
  const torchium::detail::Phase phase("torchium::factors");
  c10::NoGradGuard no_grad;
  check_call_tensors(call, 0);
  check_norm(call, weight_shape, 0);
  const bool has_kernels = call.input.numel() > 0 && has_norm_kernels(sum, call);
  if (has_kernels) {
    store_norm_blocks(sum, call, sharing, accumulate);
    return;
  }
  if (!accumulate) {
    sum.zero_();
  }
  if (call.input.numel() == 0) {
    return;
  }
  const bool reduces = sharing == WeightSharing::kReduce;
  const auto gradient = [&](const at::Tensor& of_positions) {
    return reduces ? sum_over_positions(call, of_positions) : of_positions;
  };
  const auto moment = [&](const at::Tensor& left, const at::Tensor& right) {
    const at::Tensor product = left * right;
    return (reduces ? product : sum_over_positions(call, product)).sum(0).flatten();
  };
  const auto entry = [&](int64_t i, int64_t j) { return sum.select(2, j).select(1, i); };
  const at::Tensor g = call.output_gradient.to(sum.scalar_type());
  const at::Tensor u = gradient(normalized_input(call, sum.scalar_type()) * g);
  entry(0, 0).add_(moment(u, u));
  if (sum.size(-1) == 2) {
    const at::Tensor v = gradient(g);
    entry(0, 1).add_(moment(u, v));
    entry(1, 0).copy_(entry(0, 1));
    entry(1, 1).add_(moment(v, v));
  }
}

}  // namespace torchium::gradients::detail
