// Per-sample gradients of biases and of the weights of norms, formed explicitly.
#pragma once

#include "gradients/layer_use.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// [n, *shape] in `dtype`. ValueError, naming `use_index`, unless the use fits a parameter of this
// shape.
at::Tensor bias_rows(const LayerUse& use, at::IntArrayRef shape, at::ScalarType dtype,
                     size_t use_index);

// The same for the weight of a layer norm or group norm.
at::Tensor norm_weight_rows(const LayerUse& use, at::IntArrayRef shape, at::ScalarType dtype,
                            size_t use_index);

}  // namespace torchium::gradients::detail
