// Rounding errors of the gradients that autograd has computed.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// A bound of the rounding error of each gradient, relative to its norm. The lowest precision among
// the gradient and the tensors of its calls counts: autocast and TF32 compute in less than the
// gradient's own. Calls have parameters by their index in `grads`.
std::vector<double> gradient_roundings(at::TensorList grads,
                                       const std::vector<gradients::detail::LayerCall>& calls);

}  // namespace torchium::optim::detail
