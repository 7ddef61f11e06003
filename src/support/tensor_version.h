// Whether a tensor has been changed in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::detail {

// Rises with every change in place; 0 for inference tensors, which do not count.
inline int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
}

}  // namespace torchium::detail
