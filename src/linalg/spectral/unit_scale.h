// Batches of matrices of any scale, in units in which products neither overflow nor underflow.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Matrices A [N, m, n] = 2^exponent matrix, with the largest entry of `matrix` in [1/2, 1); zero
// where A is zero or not finite.
struct UnitScaled {
  at::Tensor matrix;
  at::Tensor exponent;  // [N, 1, 1] int32
  at::Tensor finite;    // [N, 1, 1]

  // NaN for the matrices that are not finite, X [N, ., .].
  at::Tensor or_nan(const at::Tensor& X) const;
};

UnitScaled unit_scaled(const at::Tensor& A);

// 2^exponent x, for x in float32 or float64 and exponents of numbers of its dtype or differences of
// them. In float64 by two factors, because the power alone may be out of range.
at::Tensor times_power_of_two(const at::Tensor& x, const at::Tensor& exponent);

}  // namespace torchium::linalg::detail
