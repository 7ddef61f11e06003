// Batched symmetric eigendecomposition: on the CPU with every core busy, on a CUDA device all
// matrices at once.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

struct Eigensystem {
  at::Tensor values;   // [N, n] ascending
  at::Tensor vectors;  // [N, n, n] in columns; the memory layout is column by column
};

// S: [N, n, n] float32 or float64, contiguous, symmetric, finite and of a moderate scale
// (Normalized). On the CPU the result is always finite (checked_eigh.h). On a CUDA device, where
// the host reads nothing, it is NaN if the solver does not converge.
Eigensystem symmetric_eigensystem(const at::Tensor& S);

// Rounding error of the eigenvalues of a matrix of order n, in units of the largest one. An upper
// bound of LAPACK's measured errors on singular matrices (1.5 u at n = 4, 8.3 u at n = 1024).
double eigenvalue_noise(int64_t n, at::ScalarType dtype);

}  // namespace torchium::linalg::detail
