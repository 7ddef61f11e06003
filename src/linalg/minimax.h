// Coefficients of the minimax coupled iteration for inverse p-th roots.
#pragma once

#include <torchium/export.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torchium::linalg::detail {

// q(x) = a + b x + c x^2 of one step.
struct MinimaxStep {
  double a, b, c;
};

// Steps that take X = I, M to X <- X q(M), M <- q(M)^p M with |1 - M| within rounding for any
// spectrum of M in [lower, 1]. Each q minimises max |1 - x^(1/p) q(x)| over the interval that the
// steps before left, widened by the rounding error of a step (`unit_roundoff`); the greedy choice
// is optimal for the composition, as in Polar Express (Amsel et al. 2025, arXiv 2505.16932).
// Computed at first use, then kept for the life of the process. Thread-safe.
TORCHIUM_API std::shared_ptr<const std::vector<MinimaxStep>> minimax_schedule(int64_t root,
                                                                              double lower,
                                                                              double unit_roundoff);

}  // namespace torchium::linalg::detail
