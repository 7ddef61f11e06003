// Derivatives with respect to lists of parameters, as vectors of all their entries.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::linalg::detail {

// c10::ValueError with the name of the function: no parameters, one that is there twice or does not
// require gradients, mixed dtypes or devices.
void check_params(const char* function, const std::vector<at::Tensor>& params);

// The gradient of (y * weights).sum(), [P]; undefined if y depends on none of the inputs. Keeps the
// graph; with create_graph it has one of its own.
at::Tensor flat_gradient(const at::Tensor& y, const std::vector<at::Tensor>& inputs,
                         const at::Tensor& weights, bool create_graph);

// The same, zero if y depends on none of the inputs, without a graph.
at::Tensor flat_derivative(const at::Tensor& y, const std::vector<at::Tensor>& inputs,
                           const at::Tensor& weights);

}  // namespace torchium::linalg::detail
