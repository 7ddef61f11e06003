// Schedules of the minimax coupled iteration, selected on the device.
#pragma once

#include "cuda_kernels/inverse_root/root_schedule_table.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

using MinimaxScheduleTable = ScheduleTable<double, 64, 16>;

// For matrices i whose levels[i] is in the table: coefficients[k, i, :], k < steps, and lengths[i].
// coefficients: [steps, matrices, 3]. The caller checks cudaGetLastError().
void select_schedules(const MinimaxScheduleTable& schedules, const int64_t* levels,
                      int64_t matrices, double* coefficients, int64_t* lengths,
                      cudaStream_t stream);

}  // namespace torchium::cuda_kernels
