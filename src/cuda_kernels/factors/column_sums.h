// Sums of the vectors in the rows of a matrix.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// X: [count, pitch], 16-bit, aligned to 16 bytes, pitch a multiple of 8.
struct ColumnSums {
  const void* X;
  int64_t count;
  int pitch;
  bool is_bfloat16;  // not fp16
  float* sums;       // [kSumParts, pitch]: of some rows each
};

constexpr int kSumParts = 32;

cudaError_t column_sums(const ColumnSums& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
