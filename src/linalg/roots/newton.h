// Inverse p-th roots by matrix products only.
#pragma once

#include "linalg/products/symmetric_storage.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

// Limits that keep the iteration within the precision of a dtype, for matrices of order n.
struct NewtonLimits {
  double unit_roundoff;
  double noise;  // of the eigenvalues, in units of the bound: null ones are so far below zero
  double lowest_start;    // of the interval
  double smallest_floor;  // the floor of a null matrix

  // The interval starts at max(damping, kNoiseMargin (noise - damping), lowest_start), in units of
  // its upper end: the iteration diverges on negative eigenvalues as large as the lower end, and
  // grows by a factor of three at a quarter of it. Damping raises the noise above zero.
  static constexpr double kNoiseMargin = 8.0;

  // The lowest start is at least 2^lowest_level.
  int64_t lowest_level() const;
};
NewtonLimits newton_limits(int64_t n, at::ScalarType dtype);

// A root with a larger residual has failed. Correct float32 roots come close to it at the lowest
// floor: there an error of 1e-3 in the root is an error of 0.1 in the residual.
constexpr double kNewtonResidualTolerance = 0.25;
// A root with an entry above this times floor^(-1/p) has failed too: negative eigenvalues.
constexpr double kLargestNewtonRoot = 64.0;

struct NewtonRoot {
  at::Tensor root;        // [N, n, n], in the units of A
  at::Tensor damping;     // [N] float64, in the units of Normalized, as are floor and top
  at::Tensor iterations;  // [N] int64
  at::Tensor floor;       // [N] float64
  at::Tensor top;         // [N] float64: the spectrum of the damped matrix is in [0, top]
};

// (A + (eps + relative_eps bound) I)^(-1/p) by the minimax coupled iteration; bound = min(Frobenius
// norm, largest absolute row sum) of A is at least its largest eigenvalue. A is positive
// semi-definite up to rounding. On a CUDA device the host reads nothing: the device chooses the
// number of iterations of each matrix.
NewtonRoot newton_inverse_root(const Normalized& input, int64_t p, double eps, double relative_eps);

}  // namespace torchium::linalg::detail
