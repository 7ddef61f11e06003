// A dense matrix times a few columns.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// A X for A [n, n] and X [n, columns], as at::matmul, but reading A once: on a GPU by a kernel, for
// 2 to 8 columns that are contiguous each and no derivative.
at::Tensor dense_product(const at::Tensor& A, const at::Tensor& X);

// The same for a symmetric A. On a GPU a large matrix in float32 is read below the diagonal alone.
at::Tensor symmetric_dense_product(const at::Tensor& A, const at::Tensor& X);

}  // namespace torchium::linalg::detail
