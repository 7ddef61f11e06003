// Eigensystems of symmetric matrices on the CPU, also where LAPACK fails.
//
// LAPACK's divide and conquer does not converge, or returns NaN, for some sparse matrices of low
// rank, because intermediate numbers underflow (MKL in torch 2.11, float32, Gram matrices of four
// rows: every third one of order 512). Therefore rows without off-diagonal entries are left out,
// every result is checked, and a wrong one is recomputed: first in float64 with a shift, which
// keeps intermediate numbers away from zero, then by Jacobi's method, which cannot fail.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

// S: [N, n, n], n > 0, contiguous, finite, of a moderate scale (Normalized). values: [N, n];
// vectors: [N, n, n] in columns, in LAPACK's layout. On the calling thread.
void solve_checked(const at::Tensor& S, at::Tensor values, at::Tensor vectors);

// Whether S = Q D Q^T and Q Q^T = I, up to about a hundred times the usual rounding error, in the
// direction of one vector of signs. S: [n, n], contiguous; values: [n], D; vectors: [n, n], Q, in
// columns, in LAPACK's layout.
TORCHIUM_API bool is_eigensystem(const at::Tensor& S, const at::Tensor& values,
                                 const at::Tensor& vectors);

// The number of matrices in this process that were solved again, because LAPACK did not converge or
// was wrong.
int64_t eigh_retries();

// For tests: how many attempts per matrix give wrong eigenvalues. 1: LAPACK in the matrix's dtype;
// 2: in float64 too.
TORCHIUM_API void spoil_first_attempts(int attempts);

}  // namespace torchium::linalg::detail
