// Batches of matrices of any scale, in units in which products neither overflow nor underflow.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Matrices [N, m, n] times powers of two that bring the largest entry to [1/2, 1); zero where a
// matrix is not finite.
struct UnitScaled {
  at::Tensor matrix;
  at::Tensor scale;   // [N, 1, 1] of the dtype of the matrices
  at::Tensor finite;  // [N, 1, 1]

  // NaN for the matrices that are not finite, X [N, ., .].
  at::Tensor or_nan(const at::Tensor& X) const;
};

UnitScaled unit_scaled(const at::Tensor& A);

}  // namespace torchium::linalg::detail
