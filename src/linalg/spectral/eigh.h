// Symmetric eigendecomposition of stacks of matrices: with every core busy on the CPU, all matrices
// at once on a CUDA device.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

struct Eigensystem {
  at::Tensor values;   // [N, n] ascending
  at::Tensor vectors;  // [N, n, n] in columns; the memory layout is column by column
};

// S: [N, n, n] float32 or float64, contiguous, symmetric, finite and of a moderate scale
// (Normalized). On the CPU the result is always finite (checked_eigh.h). On a CUDA device, where
// nothing is read on the host, the result is NaN if the solver does not converge.
Eigensystem symmetric_eigensystem(const at::Tensor& S);

// Rounding error of the eigenvalues of a matrix of order n, in units of the largest one. Larger
// than what was measured for LAPACK on singular matrices (1.5 u at n = 4, 8.3 u at n = 1024).
double eigenvalue_noise(int64_t n, at::ScalarType dtype);

}  // namespace torchium::linalg::detail
