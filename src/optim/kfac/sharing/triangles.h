// Symmetric matrices as their lower triangles, row by row: half as much to send.
#pragma once

#include "torchium/export.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// matrices: each [..., n, n] symmetric, contiguous, of one dtype. Returns [numbers].
TORCHIUM_API at::Tensor pack_triangles(const std::vector<at::Tensor>& matrices);
// The reverse. Both triangles of each matrix become those in `packed`.
TORCHIUM_API void unpack_triangles_(const std::vector<at::Tensor>& matrices,
                                    const at::Tensor& packed);

}  // namespace torchium::optim::detail
