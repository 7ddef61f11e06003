// Operators on lists of parameters, made of the graph of a loss.
#pragma once

#include <torchium/linalg/fisher.h>
#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torchium::linalg::detail {

// c10::ValueError with the name of the function: no parameters, one that is there twice or does not
// require gradients, mixed dtypes or devices.
void check_params(const char* function, const std::vector<at::Tensor>& params);

// torchium/linalg/hessian.h and torchium/linalg/fisher.h, of what loss_fn has returned. The
// parameters have passed check_params().
LinearOperator hvp_operator(const at::Tensor& loss, const std::vector<at::Tensor>& params);
LinearOperator fisher_operator(const SampleLosses& found, const std::vector<at::Tensor>& params,
                               const std::string& fisher);

// The gradient of (y * weights).sum(), [P], with a graph; undefined if y depends on none of the
// parameters.
at::Tensor flat_gradient(const at::Tensor& y, const std::vector<at::Tensor>& params,
                         const at::Tensor& weights);

// The derivatives of (y * row).sum() for each row of [k, *y.shape], [k, entries of all inputs].
// Zero for inputs that y does not depend on. All rows in one backward pass (vmap), a single one
// without vmap, which cannot batch every operation; one_by_one: each by itself. Keeps the graph.
at::Tensor flat_derivatives(const at::Tensor& y, const std::vector<at::Tensor>& inputs,
                            const at::Tensor& rows, bool one_by_one = false);

// Whether GroupNorm is in the graph of y. Under vmap its second derivative raises an error, or with
// one group is wrong.
bool has_group_norm(const at::Tensor& y);

}  // namespace torchium::linalg::detail
