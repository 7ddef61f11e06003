// Whether the captured tensors of a layer belong to the samples of a batch, row by row.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::gradients::detail {

// One factor per sample, [samples], for the gradients of the losses: a row that depends on the loss
// of its own sample alone is scaled by its factor. Powers of two, so that nothing is rounded.
at::Tensor sample_factors(int64_t samples, const at::TensorOptions& options);

// Whether the rows of each output gradient are those of the same use scaled by `factors`.
bool are_scaled(const std::vector<LayerCall>& calls, const std::vector<LayerCall>& scaled,
                const at::Tensor& factors);

// Whether a pass over the first sample alone has the first row of each call.
bool begin_with(const std::vector<LayerCall>& calls, const std::vector<LayerCall>& of_first);

// Whether the layers have received the same rows, rolled by one, in a pass over the rolled batch.
bool are_rolled(const std::vector<LayerCall>& calls, const std::vector<LayerCall>& rolled);

// Whether rows are the same up to the rounding of other kernels.
bool rows_agree(const at::Tensor& rows, const at::Tensor& expected);

}  // namespace torchium::gradients::detail
