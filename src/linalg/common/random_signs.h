// Independent signs, +1 or -1 with equal probability (Rademacher variables), by a counter-based
// generator: equal on every device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

namespace torchium::linalg::detail {

// [n, columns], of float32 or float64. Column j holds stream first_stream + j of `seed`. Each
// column is contiguous.
at::Tensor random_signs(int64_t n, int64_t columns, uint64_t seed, uint64_t first_stream,
                        const at::TensorOptions& options);

// The same as the rows of `rows`, contiguous.
void random_signs_(const at::Tensor& rows, uint64_t seed, uint64_t first_stream);

}  // namespace torchium::linalg::detail
