// The rows of a convolution weight with few inputs, by a kernel of their own.
#pragma once

#include "gradients/jacobian/device_sums.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torchium::gradients::detail {

struct NarrowRows {
  at::Tensor weight;  // [samples, 1, fan_out, fan_in]
  at::Tensor bias;    // [samples, fan_out]
};

// Nothing unless the kernel takes them: float32 on a GPU, no groups, few inputs (as the first layer
// of an image network has), several positions, and each row in exactly one call.
std::optional<NarrowRows> narrow_rows(const std::vector<DeviceRows::Call>& calls, int64_t samples);

}  // namespace torchium::gradients::detail
