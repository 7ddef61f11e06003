// Inverse p-th roots by matrix products alone.
#pragma once

#include "linalg/symmetric_storage.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

struct NewtonRoot {
  at::Tensor root;        // [N, n, n], in the units of A
  at::Tensor damping;     // [N] float64, in the units of Normalized, as is the floor
  at::Tensor iterations;  // [N] int64
  at::Tensor floor;       // [N] float64
};

// (A + (eps + relative_eps bound) I)^(-1/p) by the minimax coupled iteration; bound = min(Frobenius
// norm, largest absolute row sum) of A is at least its largest eigenvalue. A is positive
// semi-definite up to rounding. The spectral bounds are read on the host, which chooses the
// iterations of each matrix.
NewtonRoot newton_inverse_root(const Normalized& input, int64_t p, double eps, double relative_eps);

}  // namespace torchium::linalg::detail
