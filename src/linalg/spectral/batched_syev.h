// Batched symmetric eigenproblems on a CUDA device.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Whether batched_syev_ supports S [N, n, n] in this build.
bool has_batched_syev(const at::Tensor& S);

// Eigenvalues [N, n], ascending, and eigenvectors of the matrices in `vectors` [N, n, n], which
// they overwrite: the transpose of `vectors` is contiguous, float32 or float64, N and n > 0. By
// cusolverDnXsyevBatched: the host reads nothing. If it fails, the result is NaN.
void batched_syev_(at::Tensor& values, at::Tensor& vectors);

}  // namespace torchium::linalg::detail
