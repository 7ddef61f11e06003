#include "cuda_kernels/inverse_root/minimax_schedule_table.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    select_schedules_kernel(const __grid_constant__ MinimaxScheduleTable schedules,
                            const int64_t* levels, int64_t matrices, double* coefficients,
                            int64_t* lengths) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= matrices) return;
  const int64_t level = levels[i] - schedules.lowest_level;
  if (level < 0 || level >= schedules.levels) return;
  lengths[i] = schedules.lengths[level];
  for (int k = 0; k < schedules.steps; ++k) {
    for (int c = 0; c < 3; ++c) {
      coefficients[(k * matrices + i) * 3 + c] =
          schedules.coefficients[(level * schedules.steps + k) * 3 + c];
    }
  }
}

}  // namespace

void select_schedules(const MinimaxScheduleTable& schedules, const int64_t* levels,
                      int64_t matrices, double* coefficients, int64_t* lengths,
                      cudaStream_t stream) {
  if (matrices == 0) return;
  const int64_t blocks = (matrices + kThreads - 1) / kThreads;
  select_schedules_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      schedules, levels, matrices, coefficients, lengths);
}

}  // namespace torchium::cuda_kernels
