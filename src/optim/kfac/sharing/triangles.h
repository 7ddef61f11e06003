// Symmetric matrices as their lower triangles, row by row: half as much to send. On CUDA devices.
#pragma once

#include "torchium/export.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// float32 on a CUDA device. Never in a build without CUDA.
TORCHIUM_API bool has_triangle_kernels(const at::Tensor& matrices);

// matrices: each [..., n, n] symmetric, contiguous, with kernels. Returns [numbers].
TORCHIUM_API at::Tensor pack_triangles(const std::vector<at::Tensor>& matrices);
// The reverse. Both triangles of each matrix become those in `packed`.
TORCHIUM_API void unpack_triangles_(const std::vector<at::Tensor>& matrices,
                                    const at::Tensor& packed);

}  // namespace torchium::optim::detail
