// Per-sample gradients of biases and norm weights, formed explicitly.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// [n, *shape] in `dtype`. ValueError, naming `call_index`, unless the call fits a parameter of this
// shape.
at::Tensor bias_rows(const LayerCall& call, at::IntArrayRef shape, at::ScalarType dtype,
                     size_t call_index);

// The check alone.
void check_bias(const LayerCall& call, at::IntArrayRef shape, size_t call_index);

// The same for the weight of a norm.
at::Tensor norm_weight_rows(const LayerCall& call, at::IntArrayRef shape, at::ScalarType dtype,
                            size_t call_index);

// The normalised input of a norm, in `dtype`: what its weight multiplies. Of batch norm in training
// mode, with the statistics of this input.
at::Tensor normalized_input(const LayerCall& call, at::ScalarType dtype);

// The eps of a norm. An RMS norm without one has that of the dtype in which PyTorch computes it:
// float32 for 16 bits.
double eps_of_norm(const LayerCall& call);

// Sums a tensor of the shape of the output over positions: [n, *shape of the bias].
at::Tensor sum_over_positions(const LayerCall& call, const at::Tensor& output);

// ValueError, naming `call_index`, unless a norm with a weight of this shape got this input and
// output gradient.
void check_norm(const LayerCall& call, at::IntArrayRef shape, size_t call_index);

}  // namespace torchium::gradients::detail
