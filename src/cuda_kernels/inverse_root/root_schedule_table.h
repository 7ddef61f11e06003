// Schedules of the iterations for inverse p-th roots for every interval [2^level, 1], as a kernel
// argument: nothing is copied to the device beforehand, so even the first call can be captured in a
// CUDA graph.
#pragma once

namespace torchium::cuda_kernels {

// q(x) = a + b x + c x^2 of step k of the schedule for [2^(lowest_level + r), 1] is
// coefficients[(r * steps + k) * 3]. Steps beyond the length of a schedule are q = 1.
template <typename T, int max_levels, int max_steps>
struct ScheduleTable {
  static constexpr int kMaxLevels = max_levels;
  static constexpr int kMaxSteps = max_steps;  // more for fewer levels: kCapacity in all
  static constexpr int kCapacity = max_levels * max_steps;

  int lowest_level;
  int levels;
  int steps;  // the most of any level
  int lengths[max_levels];
  T coefficients[3 * kCapacity];
};

// The last step, in single fp16 products, for matrices with a spectrum around 1:
//   Z = M - center I,  S = Z^2,  V = Z S + f S + g Z,
//   W = a I + b Z + c S + d V + e V^2,  X <- X + X W  (linalg/roots/minimax.h).
struct LastStep {
  float center, a, b, c, d, e, f, g;
};

// The float32 iteration: quadratic steps, possibly none, and a last step.
struct RootScheduleTable : ScheduleTable<float, 24, 15> {
  LastStep last[kMaxLevels];
};

}  // namespace torchium::cuda_kernels
