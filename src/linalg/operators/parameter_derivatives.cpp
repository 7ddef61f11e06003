#include "linalg/operators/parameter_derivatives.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

namespace torchium::linalg::detail {

void check_params(const char* function, const std::vector<at::Tensor>& params) {
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_VALUE(params[i].defined(), function, ": params[", i, "] is an undefined tensor.");
  }
  TORCH_CHECK_VALUE(
      std::any_of(params.begin(), params.end(), [](const at::Tensor& p) { return p.numel() > 0; }),
      function, ": params has no entries; pass at least one parameter.");
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& p = params[i];
    TORCH_CHECK_VALUE(p.requires_grad(), function, ": params[", i,
                      "] does not require gradients; leave it out.");
    TORCH_CHECK_VALUE(p.scalar_type() == at::kFloat || p.scalar_type() == at::kDouble, function,
                      ": params[", i, "] is ", c10::getDtypeNames(p.scalar_type()).first,
                      "; it must be float32 or float64.");
    const auto is_p = [&](const at::Tensor& other) { return other.is_same(p); };
    TORCH_CHECK_VALUE(std::none_of(params.begin(), params.begin() + i, is_p), function, ": params[",
                      i, "] is in params twice.");
    TORCH_CHECK_VALUE(
        p.scalar_type() == params[0].scalar_type() && p.device() == params[0].device(), function,
        ": params must be of one dtype and on one device.");
  }
}

at::Tensor flat_gradient(const at::Tensor& y, const std::vector<at::Tensor>& inputs,
                         const at::Tensor& weights, bool create_graph) {
  const auto found = torch::autograd::grad({y}, inputs, {weights}, /*retain_graph=*/true,
                                           create_graph, /*allow_unused=*/true);
  const auto is_defined = [](const at::Tensor& x) { return x.defined(); };
  if (std::none_of(found.begin(), found.end(), is_defined)) return {};
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    parts.push_back((found[i].defined() ? found[i] : at::zeros_like(inputs[i])).flatten());
  }
  return at::cat(parts);
}

at::Tensor flat_derivative(const at::Tensor& y, const std::vector<at::Tensor>& inputs,
                           const at::Tensor& weights) {
  if (y.requires_grad()) {  // else it is constant in all inputs
    const at::Tensor found = flat_gradient(y, inputs, weights, /*create_graph=*/false);
    if (found.defined()) return found;
  }
  int64_t entries = 0;
  for (const at::Tensor& x : inputs) entries += x.numel();
  return at::zeros({entries}, weights.options());
}

}  // namespace torchium::linalg::detail
