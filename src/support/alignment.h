// Where the memory of a tensor begins.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::detail {

// At a multiple of 16 bytes, as vector loads and copies of tiles need it.
inline bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

}  // namespace torchium::detail
