// Singular value decompositions: see torchium/linalg/decompositions.h.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>

#include <tuple>

namespace torchium::linalg::detail {

// U [..., m, k], S [..., k] descending, V^T [..., k, n], with k = min(m, n).
std::tuple<at::Tensor, at::Tensor, at::Tensor> svd(const at::Tensor& A);
std::tuple<at::Tensor, at::Tensor, at::Tensor> svd_meta(const at::Tensor& A);

// The same for X [N, m, n] float32, finite and of a moderate scale (unit_scale.h), by products in
// float64 and an eigenproblem in float32. The host reads nothing.
TORCHIUM_API std::tuple<at::Tensor, at::Tensor, at::Tensor> svd_by_polar(const at::Tensor& X);

}  // namespace torchium::linalg::detail
