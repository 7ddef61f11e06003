// Eigensystems of symmetric matrices on the CPU, whatever LAPACK makes of them.
//
// LAPACK's divide and conquer does not converge, or returns NaN, for some sparse matrices of low
// rank: numbers underflow on the way (MKL in torch 2.11, float32, Gram matrices of four rows: each
// third of order 512). So rows without couplings are left out, every answer is checked, and a wrong
// one is made again: in float64 and with a shift, which keeps intermediate numbers away from zero,
// and at last by Jacobi's method, which cannot fail.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

// S: [N, n, n], n > 0, contiguous, finite, of a moderate scale (Normalized). values: [N, n];
// vectors: [N, n, n] in columns, in LAPACK's layout. On the calling thread.
void solve_checked(const at::Tensor& S, at::Tensor values, at::Tensor vectors);

// Matrices of this process that were solved again, because LAPACK did not converge or was wrong.
int64_t eigh_retries();

// For tests: the first attempts of every matrix that count as failed. 1: LAPACK in the dtype of the
// matrix; 2: in float64 too.
TORCHIUM_API void fail_first_attempts(int attempts);

}  // namespace torchium::linalg::detail
