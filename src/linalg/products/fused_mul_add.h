// a * b + c in one pass: see torchium/linalg/products.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Any backend, including meta tensors.
at::Tensor fused_mul_add(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c);

// By differentiable operators.
at::Tensor fused_mul_add_by_torch(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c);

}  // namespace torchium::linalg::detail
