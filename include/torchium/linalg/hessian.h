// The Hessian of a loss, as an operator.
#pragma once

#include <torchium/export.h>
#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace torchium::linalg {

// H v = d/dp (dL/dp . v) (Pearlmutter 1994, "Fast exact multiplication by the Hessian") on the
// concatenated parameters. `loss_fn` returns the loss, a scalar that depends on the parameters
// twice differentiably. It is evaluated once, here; each product is a backward pass through its
// gradient, for all columns together (vmap), with GroupNorm, which vmap cannot batch, one column at
// a time. The operator keeps the graph of the loss: the parameters must not change in place before
// the last product.
//
// params: of one dtype, float32 or float64, on one device. c10::ValueError: no parameters, one
// that is there twice or does not require gradients, mixed dtypes or devices, or a loss that is not
// a real scalar or depends on none of the parameters.
TORCHIUM_API LinearOperator hvp_operator(const std::function<at::Tensor()>& loss_fn,
                                         const std::vector<at::Tensor>& params);

}  // namespace torchium::linalg
