// Per-sample gradients of biases and norm weights, formed explicitly.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// [n, *shape] in `dtype`. ValueError, naming `call_index`, unless the call fits a parameter of this
// shape.
at::Tensor bias_rows(const LayerCall& call, at::IntArrayRef shape, at::ScalarType dtype,
                     size_t call_index);

// The same for the weight of a layer norm or group norm.
at::Tensor norm_weight_rows(const LayerCall& call, at::IntArrayRef shape, at::ScalarType dtype,
                            size_t call_index);

}  // namespace torchium::gradients::detail
