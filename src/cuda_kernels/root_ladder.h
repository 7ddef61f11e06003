// Schedules of the float32 iteration for inverse p-th roots, quadratic steps and a last one, for
// every interval [2^rung, 1]. A kernel argument, as MinimaxLadder is.
#pragma once

namespace torchium::cuda_kernels {

// The last step, in single fp16 products, of matrices with a spectrum around 1:
//   Z = M - center I,  S = Z^2,  V = Z S + f S + g Z,
//   W = a I + b Z + c S + d V + e V^2,  X <- X + X W  (linalg/minimax.h).
struct LastStep {
  float center, a, b, c, d, e, f, g;
};

// q(x) = a + b x + c x^2 of step k of the schedule for [2^(lowest_rung + r), 1] is
// coefficients[(r * steps + k) * 3]. Steps beyond the length of a schedule are q = 1.
struct RootLadder {
  static constexpr int kMaxRungs = 24;
  static constexpr int kMaxSteps = 15;

  int lowest_rung;
  int rungs;
  int steps;               // the most quadratic steps of a rung
  int lengths[kMaxRungs];  // quadratic steps before the last one; may be 0
  float coefficients[3 * kMaxRungs * kMaxSteps];
  LastStep last[kMaxRungs];
};

}  // namespace torchium::cuda_kernels
