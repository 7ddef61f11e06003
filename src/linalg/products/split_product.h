// Products of float32 matrices on Hopper's tensor cores: each operand as two fp16 parts, 22 bits,
// with a scale of its own for each row of A and each column of B (Ootomo and Yokota 2022, arXiv
// 2203.03341). The error of an element is about that of float32's own sum.
#pragma once

#include "linalg/products/tile_product.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

// False in a build without CUDA.
bool has_split_product(c10::Device device);

// Whether the device has the kernel, and the product [m, k] by [k, n] is so large that it is faster
// than float32 arithmetic.
bool split_product_pays(c10::Device device, int64_t m, int64_t n, int64_t k);

// The parts of a matrix in `buffer`, which is allocated if it is too small.
TileOperand split_rows(const at::Tensor& A, at::Tensor& buffer);
TileOperand split_columns(const at::Tensor& B, at::Tensor& buffer);

// out [m, n] <- A B; out has contiguous rows. `buffer` holds the product if out's rows are not
// where the kernel can write them. A row of A or a column of B with Inf or NaN yields NaN or Inf.
void multiply_split_out(at::Tensor& out, const TileOperand& A, const TileOperand& B,
                        at::Tensor& buffer);

}  // namespace torchium::linalg::detail
