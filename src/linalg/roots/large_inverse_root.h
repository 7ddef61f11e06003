// Inverse p-th roots of batches of large float32 matrices on a Hopper GPU. CUDA builds only.
#pragma once

#include "cuda_kernels/inverse_root/inverse_root.h"
#include "cuda_kernels/inverse_root/root_schedule_table.h"

#include <ATen/core/Tensor.h>

#include <cuda_runtime_api.h>

namespace torchium::linalg::detail {

// options: of the matrices of the batch. Workspace: 4 n^2 floats per matrix, for as many matrices
// at a time as fit in 1 GiB, or 512 MiB for orders from 513 to 1024. The host reads nothing.
void large_inverse_root(const cuda_kernels::InverseRoot& arguments,
                        const cuda_kernels::RootScheduleTable& schedules,
                        const at::TensorOptions& options, cudaStream_t stream);

}  // namespace torchium::linalg::detail
