// Fisher matrices of scale and shift of a norm, channel by channel (unit-wise natural gradient:
// Osawa et al. 2019, arXiv 1811.12019, section 4.2), as sums over the captured calls of a layer.
#pragma once

#include "gradients/capture/layer_call.h"
#include "gradients/factors/kronecker_factors.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// sum [C, 2, 2] += sum of (u, v) (u, v)^T, element by element of the weight, which has C of them: u
// = sum of g x^ is the gradient of the scale and v = sum of g that of the shift, with the
// normalised input x^ and the output gradient g. [C, 1, 1]: of the scale alone. With kReduce the
// inner sums are over the positions of a sample, with kExpand each position counts as a sample.
// float32 or float64; exactly symmetric. Statistics count as constants, also those of a batch.
// ValueError for tensors that do not fit, with nothing changed. Only kind, settings, eps and
// tensors of the call are used. accumulate = false overwrites the sum, which need not be
// initialised.
void update_fisher_blocks_(at::Tensor& sum, const LayerCall& call, at::IntArrayRef weight_shape,
                           bool accumulate, WeightSharing sharing);

}  // namespace torchium::gradients::detail
