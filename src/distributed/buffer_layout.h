// Where parts of a buffer lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::distributed {

// The next multiple of 16 elements: every part begins where kernels and BLAS read fastest.
inline int64_t aligned(int64_t elements) { return (elements + 15) / 16 * 16; }

// The tensor that begins at this byte of a buffer of bytes.
inline at::Tensor view_in(const at::Tensor& buffer, int64_t first, at::ScalarType dtype,
                          at::IntArrayRef sizes) {
  const auto bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  return buffer.narrow(0, first, bytes).view(dtype).view(sizes);
}

}  // namespace torchium::distributed
