// Kronecker products: see torchium/linalg/products.h for shapes and errors.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Both consist of differentiable operators.
at::Tensor kron(const at::Tensor& A, const at::Tensor& B);
at::Tensor kron_matmul(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X);

at::Tensor kron_solve(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X,
                      double damping);
at::Tensor kron_solve_meta(const at::Tensor& A, const at::Tensor& B, const at::Tensor& X,
                           double damping);

}  // namespace torchium::linalg::detail
