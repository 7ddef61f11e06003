// Lower triangular Toeplitz matrices by their first columns [batch, n, 1]: products by FFT, in
// O(n log n) per column where the matrix would take n^2. float32 or float64.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// M X, or M^T X, with X [batch, n, columns].
at::Tensor toeplitz_multiply(const at::Tensor& M, const at::Tensor& X, bool transposed);

// P(M^T M), with P as in structured_matrix.h.
at::Tensor toeplitz_gram(const at::Tensor& M);

// P(M^T X X^T M) with X [batch, n, count]; M undefined: the identity.
at::Tensor toeplitz_moment(const at::Tensor& X, const at::Tensor& M);

// P of an S with rows and columns of zeros behind it up to order n, from P(S).
at::Tensor toeplitz_padded(const at::Tensor& projection, int64_t n);

}  // namespace torchium::linalg::detail
