// Checks that the rows of a layer's captured tensors are the samples of a batch.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace torchium::gradients::detail {

// One factor per sample, [samples], for the gradients of the losses: a row that depends only on its
// own sample's loss is scaled by its factor. Powers of two, so nothing is rounded.
at::Tensor sample_factors(int64_t samples, const at::TensorOptions& options);

// Whether the rows of each output gradient are those of the same call scaled by `factors`.
bool are_scaled(const std::vector<LayerCall>& calls, const std::vector<LayerCall>& scaled,
                const at::Tensor& factors);

// Whether a pass over the first sample alone gives the first row of each call.
bool begin_with(const std::vector<LayerCall>& calls, const std::vector<LayerCall>& of_first);

// Whether the layers receive the same rows, rolled by one, in a pass over the rolled batch.
bool are_rolled(const std::vector<LayerCall>& calls, const std::vector<LayerCall>& rolled);

// Whether rows agree up to the rounding of other kernels.
bool rows_agree(const at::Tensor& rows, const at::Tensor& expected);

// Throws c10::ValueError, naming parameters, if layers of one backward pass disagree on the number
// of samples, or if an embedding probably looked up one list of positions for all samples.
void check_samples(const std::vector<LayerCall>& calls,
                   const std::function<std::string(int64_t)>& name_of_param);

}  // namespace torchium::gradients::detail
