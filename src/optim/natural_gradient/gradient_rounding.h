// How well the gradients that autograd has computed are known.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// A bound of the rounding error of each gradient, relative to its norm. It follows the lowest
// precision among the gradient and what its layers have seen: under autocast, or with TF32, they
// compute in less than the gradient's own. `uses`: parameters by their index in `grads`.
std::vector<double> gradient_roundings(at::TensorList grads,
                                       const std::vector<gradients::detail::LayerCall>& calls);

}  // namespace torchium::optim::detail
