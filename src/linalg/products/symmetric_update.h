// Matrix products with a symmetric result, at about half the work.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// C <- beta C + alpha X X^T.
// C: [N, n, n] symmetric, changed in place and exactly symmetric afterwards; X: [N, n, k] of the
// same dtype, any strides; on a GPU also fp16 or bfloat16 with float32 C. beta = 0 overwrites C.
TORCHIUM_API void symmetric_update_(at::Tensor& C, const at::Tensor& X, double beta, double alpha);

// C <- X Y for X and Y with a symmetric product, such as polynomials of one symmetric matrix. C:
// [N, n, n], not overlapping X or Y, exactly symmetric afterwards; X: [N, n, k]; Y: [N, k, n].
TORCHIUM_API void symmetric_product_out(at::Tensor& C, const at::Tensor& X, const at::Tensor& Y);

}  // namespace torchium::linalg::detail
