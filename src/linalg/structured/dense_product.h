// Products with a dense matrix.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torchium::linalg::detail {

// A X for A [n, n] and X [n, columns], as at::matmul, but reading A once: on a GPU by a kernel, for
// 2 to 8 columns that are contiguous each and no derivative.
at::Tensor dense_product(const at::Tensor& A, const at::Tensor& X);

// The same for a symmetric A. On a GPU a large matrix in float32 is read below the diagonal alone.
at::Tensor symmetric_dense_product(const at::Tensor& A, const at::Tensor& X);

// X A for X [..., m, n] and A [..., n, n] on a CPU, where (A^T X^T)^T takes up to twice as long.
std::optional<at::Tensor> dense_product_from_left(const at::Tensor& X, const at::Tensor& A);

}  // namespace torchium::linalg::detail
