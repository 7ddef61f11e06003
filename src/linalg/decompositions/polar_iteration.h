// Polar factors by matrix products only.
#pragma once

#include <torchium/export.h>

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Whether products in float64 are as fast on the device of A as in float32, and A is computed in
// float32.
bool has_polar_iteration(const at::Tensor& A);

// U V^T for X = U S V^T, X [N, m, n] float64, m >= n > 0, finite, with fourth powers of its norm
// in the range of float64. Singular values above rcond times the largest become one up to rounding
// errors, smaller ones at most that, and zeros stay. rcond: at least 1e-13.
//
// X <- X q(X^T X), with the quadratic minimax polynomials of the inverse square root (minimax.h;
// Polar Express, Amsel et al. 2025, arXiv 2505.16932). Each step takes three products; there are 15
// at rcond = 1.2e-7 and 7 at 0.01. The host reads nothing. The factor is that of a matrix close to
// X: measured |U H - X| / |X| is 1e-14 at rcond = 0.001, 3e-13 at 1.2e-7 and 1e-10 at 1e-13.
TORCHIUM_API at::Tensor polar_iteration(const at::Tensor& X, double rcond);

}  // namespace torchium::linalg::detail
