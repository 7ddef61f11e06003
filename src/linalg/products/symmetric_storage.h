// Memory-bound passes over batched symmetric matrices.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Copies the lower triangle of every matrix of C [N, n, n] (rows contiguous) onto its upper one.
void mirror_lower_(at::Tensor& C);

// The same for the given rows and columns of one matrix C [n, n], as far as they are in the lower
// triangle. CPU only, serial.
void mirror_lower_tile_(at::Tensor& C, int64_t row, int64_t rows, int64_t column, int64_t columns);

// Input of a solver: the symmetric part of A. If its entries are so large or small that squares or
// sums could leave the range of the dtype, it is scaled to about one by a power of two.
struct Normalized {
  at::Tensor matrix;  // [N, n, n]: scale * (A + A^T) / 2; the identity where A is not finite
  at::Tensor scale;   // [N] float64: powers of two, inside the normal range of A's dtype
  at::Tensor finite;  // [N] bool: no NaN or Inf in A
};

// A: [N, n, n] float32 or float64. The scale is chosen from the larger of max |A_ij| and `eps`.
Normalized normalize_symmetric(const at::Tensor& A, double eps);

}  // namespace torchium::linalg::detail
