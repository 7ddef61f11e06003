// Polar factors: see torchium/linalg/products.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace torchium::linalg::detail {

// U V^T of A = U S V^T, [..., m, n].
at::Tensor orthogonalize(const at::Tensor& A, std::optional<double> rcond);
at::Tensor orthogonalize_meta(const at::Tensor& A, std::optional<double> rcond);

// U V^T and V S V^T.
std::tuple<at::Tensor, at::Tensor> polar(const at::Tensor& A, std::optional<double> rcond);
std::tuple<at::Tensor, at::Tensor> polar_meta(const at::Tensor& A, std::optional<double> rcond);

}  // namespace torchium::linalg::detail
