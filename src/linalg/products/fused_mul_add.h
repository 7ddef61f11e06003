// a * b + c in one pass: see torchium/linalg/products.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Any backend, including meta tensors.
at::Tensor fused_mul_add(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c);

// Into `out`, of the shape, dtype and device of the result.
void fused_mul_add_out(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                       at::Tensor& out);

// By differentiable operators.
at::Tensor fused_mul_add_by_torch(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c);

// c[i] += a[i] * b[i]. On a GPU in one launch for hundreds of entries of equal shapes and dtypes
// that are contiguous.
void fused_mul_add_(at::TensorList a, at::TensorList b, at::TensorList c);

}  // namespace torchium::linalg::detail
