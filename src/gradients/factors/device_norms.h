// Fisher matrices of norms on a GPU: the input and the output gradient are read once, in their own
// dtypes.
#pragma once

#include "gradients/capture/layer_call.h"
#include "gradients/factors/kronecker_factors.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// Whether kernels make the blocks [C, k, k] of this call, a norm that was checked: on a GPU, blocks
// in float32, input and output gradient in float32, bfloat16 or fp16, and at most 8192 elements
// that a layer or RMS norm normalises together. Batch and group norms have no limit.
bool has_norm_kernels(const at::Tensor& blocks, const LayerCall& call);

// blocks <- sum of (u, v) (u, v)^T, or with accumulate += (fisher_blocks.h), in two launches; three
// of a group norm.
void store_norm_blocks(at::Tensor& blocks, const LayerCall& call, WeightSharing sharing,
                       bool accumulate);

}  // namespace torchium::gradients::detail
