#include "cuda_kernels/minimax_ladder.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    select_schedules_kernel(const __grid_constant__ MinimaxLadder ladder, const int64_t* rungs,
                            int64_t matrices, double* coefficients, int64_t* lengths) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= matrices) return;
  const int64_t rung = rungs[i] - ladder.lowest_rung;
  if (rung < 0 || rung >= ladder.rungs) return;
  lengths[i] = ladder.lengths[rung];
  for (int k = 0; k < ladder.steps; ++k) {
    for (int c = 0; c < 3; ++c) {
      coefficients[(k * matrices + i) * 3 + c] =
          ladder.coefficients[(rung * ladder.steps + k) * 3 + c];
    }
  }
}

}  // namespace

void select_schedules(const MinimaxLadder& ladder, const int64_t* rungs, int64_t matrices,
                      double* coefficients, int64_t* lengths, cudaStream_t stream) {
  if (matrices == 0) return;
  const int64_t blocks = (matrices + kThreads - 1) / kThreads;
  select_schedules_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      ladder, rungs, matrices, coefficients, lengths);
}

}  // namespace torchium::cuda_kernels
