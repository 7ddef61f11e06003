// Stacks of symmetric eigenproblems on a CUDA device, solved together.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Whether this build can solve S [N, n, n] by batched_syev_.
bool has_batched_syev(const at::Tensor& S);

// Eigenvalues [N, n], ascending, and eigenvectors of the matrices that `vectors` [N, n, n] holds,
// which they overwrite: the transposed of `vectors` is contiguous, float32 or float64, N and n > 0.
// cusolverDnXsyevBatched: nothing is read on the host. Where it fails, the result is NaN.
void batched_syev_(at::Tensor& values, at::Tensor& vectors);

}  // namespace torchium::linalg::detail
