// Inverse p-th roots of batches of large float32 matrices on a Hopper GPU. CUDA builds only.
#pragma once

#include "cuda_kernels/inverse_root/inverse_root.h"
#include "cuda_kernels/inverse_root/root_schedule_table.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::linalg::detail {

// Workspace of a batch: 4 n^2 floats per matrix, for as many matrices at a time as fit in 1 GiB, or
// 512 MiB for orders from 513 to 1024.
struct LargeRootMemory {
  // options: of the matrices.
  LargeRootMemory(int64_t matrices, int n, const at::TensorOptions& options);

  at::Tensor buffers;  // [4, matrices at a time, 2, order, order] fp16 numbers
  at::Tensor others;   // bytes
};

// The host reads nothing.
void large_inverse_root(const cuda_kernels::InverseRoot& arguments,
                        const cuda_kernels::RootScheduleTable& schedules,
                        const LargeRootMemory& memory, cudaStream_t stream);

}  // namespace torchium::linalg::detail
