// Symmetric positive (semi-)definite systems: see torchium/linalg/products.h for shapes and errors.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

at::Tensor spd_inverse(const at::Tensor& A, double damping);
at::Tensor spd_inverse_meta(const at::Tensor& A, double damping);

at::Tensor spd_solve(const at::Tensor& A, const at::Tensor& X, double damping);
at::Tensor spd_solve_meta(const at::Tensor& A, const at::Tensor& X, double damping);

}  // namespace torchium::linalg::detail
