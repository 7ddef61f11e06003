// Products with lists of Kronecker products: see torchium/linalg/products.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::linalg::detail {

// Whether kron_matmul_by_kernel supports the lists, which have one length and fit: CUDA tensors
// without batch dimensions.
bool has_kron_kernel(at::TensorList A, at::TensorList B, at::TensorList X);

// (A[i] (x) B[i]) X[i], with two launches for some 300 pairs of one dtype, of any shapes.
std::vector<at::Tensor> kron_matmul_by_kernel(at::TensorList A, at::TensorList B, at::TensorList X);

}  // namespace torchium::linalg::detail
