// Block Gram-Schmidt with re-orthogonalisation, and random rows where nothing is left.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

// rows [known + 2 b, n]: V, orthonormal, W of b rows, and b random ones. W becomes Q, orthonormal
// and orthogonal to V, with W = C^T V + R^T Q. Of a row of W, rounding errors may be left after the
// projection: then a random row replaces it, and its part in R is zero. projection: [known + b, b]
// float64, C above R; undefined: not wanted. By kernels in float32 on a GPU for b = 1, 2, 4 and 8.
void orthogonalise_block(const at::Tensor& rows, int64_t known, const at::Tensor& projection);

}  // namespace torchium::linalg::detail
