#include "optim/adahessian/hessian_diagonal.h"

#include "linalg/common/random_signs.h"
#include "optim/core/parameter_state.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>

namespace torchium::optim::detail {
namespace {

uint64_t new_seed() {
  return static_cast<uint64_t>(
      at::randint(std::numeric_limits<int64_t>::max(), {1}, at::kLong).item<int64_t>());
}

// Signs of the shape and dtype of each gradient. Sample s of parameter i is stream `samples i + s`,
// so that no two agree.
at::Tensor signs_like(const at::Tensor& gradient, uint64_t seed, uint64_t stream) {
  const at::TensorOptions options = gradient.options().requires_grad(false);
  const at::ScalarType dtype = gradient.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return linalg::detail::random_signs(gradient.numel(), 1, seed, stream, options.dtype(dtype))
      .view(gradient.sizes())
      .to(gradient.scalar_type());
}

// A frozen parameter may keep a gradient, of which there is no derivative by the parameter.
bool has_graph(const DiagonalRequest& request) {
  return request.param.requires_grad() && request.gradient.requires_grad();
}

// Averages over the kernel of a convolution. Dense, as a step examines it.
at::Tensor spatial_mean(const at::Tensor& diagonal) {
  if (diagonal.dim() <= 2 || diagonal.numel() == 0) {
    return diagonal;
  }
  std::vector<int64_t> kernel;
  for (int64_t d = 2; d < diagonal.dim(); ++d) {
    kernel.push_back(d);
  }
  return diagonal.mean(kernel, /*keepdim=*/true).expand_as(diagonal).contiguous();
}

}  // namespace

bool lacks_curvature(const DiagonalRequest& request) {
  return !has_graph(request) && request.gradient.ne(0).any().item<bool>();
}

bool has_graphs(const std::vector<DiagonalRequest>& requests) {
  const bool any = std::ranges::any_of(requests, has_graph);
  TORCH_CHECK_VALUE(any || std::ranges::none_of(requests, lacks_curvature),
                    "AdaHessian: no gradient has a graph, which second derivatives need; call "
                    "loss.backward(create_graph=True), and step() once after it");
  return any;
}

std::vector<at::Tensor> hessian_diagonals(const std::vector<DiagonalRequest>& requests,
                                          const at::Tensor& loss_scale) {
  std::vector<at::Tensor> params, outputs, sums;
  std::vector<size_t> members;  // the requests of these parameters
  int64_t most = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    sums.push_back(parameter_shaped_zeros(requests[i].param));
    if (has_graph(requests[i]) && requests[i].gradient.numel() > 0) {
      params.push_back(requests[i].param);
      outputs.push_back(requests[i].gradient);
      members.push_back(i);
      most = std::max(most, requests[i].samples);
    }
  }
  if (!has_graphs(requests)) {
    return sums;  // torch.distributed.checkpoint takes such a step to create the state
  }
  const uint64_t seed = new_seed();
  for (int64_t sample = 0; sample < most; ++sample) {
    // All parameters: z^T H z' has cross terms of zero mean, and one pass is enough.
    std::vector<at::Tensor> signs;
    for (const size_t i : members) {
      const uint64_t stream = static_cast<uint64_t>(most) * i + static_cast<uint64_t>(sample);
      signs.push_back(signs_like(requests[i].gradient, seed, stream));
    }
    const std::vector<at::Tensor> products =
        torch::autograd::grad(outputs, params, signs, /*retain_graph=*/sample + 1 < most,
                              /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t k = 0; k < members.size(); ++k) {
      at::Tensor& sum = sums[members[k]];
      const int64_t samples = requests[members[k]].samples;
      if (products[k].defined() && sample < samples) {
        sum.addcmul_(signs[k].to(sum.scalar_type()), products[k].detach().to(sum.scalar_type()),
                     1.0 / static_cast<double>(samples));
      }
    }
  }
  std::vector<at::Tensor> diagonals;
  for (const at::Tensor& sum : sums) {
    const at::Tensor diagonal = spatial_mean(sum.abs());
    diagonals.push_back(loss_scale.defined()
                            ? diagonal / loss_scale.to(sum.device(), sum.scalar_type())
                            : diagonal);
  }
  return diagonals;
}

}  // namespace torchium::optim::detail
