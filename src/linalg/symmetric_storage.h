// Passes over stacks of symmetric matrices that touch memory, not arithmetic.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Copies the lower triangle of every matrix of C [N, n, n] (rows contiguous) onto its upper one.
void mirror_lower_(at::Tensor& C);

// Input of a solver: the symmetric part of A, brought to the scale of one by a power of two, so
// that neither squares nor sums overflow and small matrices keep their digits.
struct Normalized {
  at::Tensor matrix;  // [N, n, n]: scale * (A + A^T) / 2; the identity where A is not finite
  at::Tensor scale;   // [N] float64: powers of two, inside the normal range of A's dtype
  at::Tensor finite;  // [N] bool: no NaN or Inf in A
};

// A: [N, n, n] float32 or float64. The scale brings the larger of max |A_ij| and `eps` to [1/2, 1),
// as far as the dtype has such a power of two.
Normalized normalize_symmetric(const at::Tensor& A, double eps);

}  // namespace torchium::linalg::detail
