// Batches of matrices whose floats are stored as one or two fp16 numbers each (split_mma.cuh).
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

namespace torchium::cuda_kernels {

// Rows are padded with zeros to a multiple of this.
constexpr int kSplitPadding = 32;

// [matrices, order, order / 32, 2, 32]: 32 hi parts, then their 32 lo parts, 128 bytes. Matrices of
// hi parts alone use the first half of their memory, as [order, order].
struct SplitMatrices {
  __half* data;
  int order;  // padded

  __host__ __device__ int64_t elements() const { return int64_t{order} * order; }
  __host__ __device__ __half* matrix(int64_t index) const { return data + 2 * index * elements(); }
  // hi of an element; its lo is kSplitPadding elements later.
  __host__ __device__ __half* at(int64_t index, int row, int column) const {
    return matrix(index) + 2 * (int64_t{row} * order + column / kSplitPadding * kSplitPadding) +
           column % kSplitPadding;
  }
};

}  // namespace torchium::cuda_kernels
