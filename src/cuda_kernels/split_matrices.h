// Stacks of matrices whose floats are kept as two halves each (split_mma.cuh).
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

namespace torchium::cuda_kernels {

// Rows are padded with zeros to a multiple of this.
constexpr int kSplitPadding = 32;

struct SplitMatrices {
  __half* data;  // [matrices, 2, order, order]: hi and lo
  int order;     // padded

  __host__ __device__ int64_t elements() const { return int64_t{order} * order; }
  __host__ __device__ __half* hi(int64_t matrix) const { return data + 2 * matrix * elements(); }
  __host__ __device__ __half* lo(int64_t matrix) const { return hi(matrix) + elements(); }
};

}  // namespace torchium::cuda_kernels
