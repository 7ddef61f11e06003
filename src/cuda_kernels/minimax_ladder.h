// Schedules of the minimax coupled iteration, chosen on a device.
#pragma once

#include "cuda_kernels/root_ladder.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

using MinimaxLadder = ScheduleLadder<double, 64, 16>;

// For matrices i whose rungs[i] is in the table: coefficients[k, i, :], k < steps, and lengths[i].
// coefficients: [steps, matrices, 3]. The caller checks cudaGetLastError().
void select_schedules(const MinimaxLadder& ladder, const int64_t* rungs, int64_t matrices,
                      double* coefficients, int64_t* lengths, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
