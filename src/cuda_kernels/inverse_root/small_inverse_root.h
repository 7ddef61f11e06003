// Inverse p-th roots of many small matrices in one launch.
#pragma once

#include "cuda_kernels/inverse_root/inverse_root.h"
#include "cuda_kernels/inverse_root/root_schedule_table.h"

#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

constexpr int kLargestSmallOrder = 128;

// Shared memory per block for matrices of order n.
int small_inverse_root_shared_bytes(int n);

// n from 1 to kLargestSmallOrder; compute capability 8.0 or higher. Returns the launch error.
cudaError_t small_inverse_root(const InverseRoot& arguments, const RootScheduleTable& schedules,
                               cudaStream_t stream);

}  // namespace torchium::cuda_kernels
