// Whether the captured tensors of a layer belong to the samples of a batch, row by row.
#pragma once

#include "gradients/layer_use.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::gradients::detail {

// One factor per sample, [samples], for the gradients of the losses: a row that depends on the loss
// of its own sample alone is scaled by its factor. Powers of two, so that nothing is rounded.
at::Tensor sample_factors(int64_t samples, const at::TensorOptions& options);

// Whether the rows of each output gradient are those of the same use scaled by `factors`.
bool are_scaled(const std::vector<LayerUse>& uses, const std::vector<LayerUse>& scaled,
                const at::Tensor& factors);

// Whether a pass over the first sample alone has the first row of each use.
bool begin_with(const std::vector<LayerUse>& uses, const std::vector<LayerUse>& of_first);

// Whether the layers have received the same rows, rolled by one, in a pass over the rolled batch.
bool are_rolled(const std::vector<LayerUse>& uses, const std::vector<LayerUse>& rolled);

// Whether rows are the same up to the rounding of other kernels.
bool rows_agree(const at::Tensor& rows, const at::Tensor& expected);

}  // namespace torchium::gradients::detail
