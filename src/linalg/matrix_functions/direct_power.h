// Powers of batched symmetric matrices without eigenvalues.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// (A + eps I)^exponent for A [N, n, n], exactly symmetric, by at most one inverse root and a few
// products: integers from 0 to 16, and -1/p, -2/p and 1/2 where a GPU has kernels for the inverse
// root. Undefined for others. Saturates; NaN for a matrix with NaN or Inf. Negative eigenvalues are
// those of matrix_inverse_root by "newton". On a GPU the host reads nothing.
at::Tensor direct_power(const at::Tensor& A, double exponent, double eps);

}  // namespace torchium::linalg::detail
