// Products of matrices in host memory, computed on a CUDA device.
#pragma once

#include "linalg/products/product_workspace.h"

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// out = A B, [..., m, k] by [..., k, n] of equal leading dimensions, on `device`, which is
// the current one. Each of out, A and
// B is there or in host memory, where out is contiguous. The host waits until its memory is read
// and written.
void streamed_matmul(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B,
                     c10::Device device, const ProductOptions& options);

}  // namespace torchium::linalg::detail
