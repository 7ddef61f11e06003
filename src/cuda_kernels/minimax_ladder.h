// Schedules of the minimax coupled iteration for every interval [2^rung, 1], as a kernel argument:
// nothing is copied to the device beforehand, so that even the first call can be captured in a CUDA
// graph.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// q(x) = a + b x + c x^2 of step k of the schedule for [2^(lowest_rung + r), 1] is
// coefficients[(r * steps + k) * 3]. Steps beyond the length of a schedule are q = 1.
struct MinimaxLadder {
  static constexpr int kMaxRungs = 64;
  static constexpr int kCapacity = 1024;  // rungs * steps at most

  int lowest_rung;
  int rungs;
  int steps;
  int lengths[kMaxRungs];
  double coefficients[3 * kCapacity];
};

// For matrices i whose rungs[i] is in the table: coefficients[k, i, :], k < steps, and lengths[i].
// coefficients: [steps, matrices, 3]. The caller checks cudaGetLastError().
void select_schedules(const MinimaxLadder& ladder, const int64_t* rungs, int64_t matrices,
                      double* coefficients, int64_t* lengths, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
