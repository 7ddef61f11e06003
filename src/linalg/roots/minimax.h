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

// Steps X <- X q(M), M <- q(M)^p M, from X = I, after which |1 - M| is within rounding for every
// spectrum of M in [lower, 1]. Each q minimises max |1 - x^(1/p) q(x)| over the interval that the
// earlier steps leave, widened by the rounding error of a step (`unit_roundoff`). The greedy choice
// is optimal for the composition, as in Polar Express (Amsel et al. 2025, arXiv 2505.16932). If the
// interval begins below 256 unit_roundoff, medium eigenvalues are kept from becoming small.
// Computed at first use, then kept for the life of the process. Thread-safe.
TORCHIUM_API std::shared_ptr<const std::vector<MinimaxStep>> minimax_schedule(int64_t root,
                                                                              double lower,
                                                                              double unit_roundoff);

// A last step of degree 6 whose four products may be as coarse as fp16, because |W| is small:
//   Z = M - center I,  S = Z^2,  V = Z S + f S + g Z,
//   W = a I + b Z + c S + d V + e V^2,  X <- X + X W,
// where 1 + W(x) is the minimax polynomial of x^(-1/p). Z, S and V vanish at the center, so their
// rounding errors shrink with the interval.
struct LastStep {
  double center, a, b, c, d, e, f, g;
};

struct LastStepSchedule {
  std::vector<MinimaxStep> steps;  // before the last one; may be none
  LastStep last;
  double error;  // max |1 - x^(1/p) (1 + W(x))| of the last step
};

// As minimax_schedule, but for float32, and ending with a LastStep once that is accurate enough:
// its own error plus the rounding error of its products is at most u / sqrt(lower), clamped to
// [8e-6, 3e-5], with u = 2 unit_roundoff. The earlier steps leave u / sqrt(lower).
TORCHIUM_API std::shared_ptr<const LastStepSchedule> last_step_schedule(int64_t root, double lower,
                                                                        double unit_roundoff);

}  // namespace torchium::linalg::detail
