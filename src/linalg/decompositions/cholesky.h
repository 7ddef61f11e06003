// Cholesky factors with a report of what was added to the diagonal: see torchium/linalg/products.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace torchium::linalg::detail {

// L [..., n, n], and the jitter [...] in float64 that was added to the diagonal.
std::tuple<at::Tensor, at::Tensor> cholesky(const at::Tensor& A, double damping);
std::tuple<at::Tensor, at::Tensor> cholesky_meta(const at::Tensor& A, double damping);

// [...], float64 for float64 and else float32.
at::Tensor spd_logdet(const at::Tensor& A, double damping);
at::Tensor spd_logdet_meta(const at::Tensor& A, double damping);

}  // namespace torchium::linalg::detail
