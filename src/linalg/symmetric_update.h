// C <- beta C + alpha X X^T for stacks of matrices, at half the work of a full product.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// C: [N, n, n] symmetric, changed in place and exactly symmetric afterwards; X: [N, n, k] of the
// same dtype, any strides. beta = 0 overwrites C.
void symmetric_update_(at::Tensor& C, const at::Tensor& X, double beta, double alpha);

}  // namespace torchium::linalg::detail
