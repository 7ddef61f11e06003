// x s = hi + lo / 2048: floats as one or two fp16 numbers with a common scale s, for tensor cores.
// s is a power of two that brings the largest magnitude below 2^15. hi alone has 11 bits, both have
// 22, down to 2^-29 of the largest (Ootomo and Yokota 2022, arXiv 2203.03341).
#pragma once

#include "cuda_kernels/common/parameter_table.h"

#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

constexpr float kLowScale = 2048.0f;

// A contiguous batch of matrices, each [rows, columns].
struct SplitFp16 {
  __half* hi;
  __half* lo;    // lo of each element; null: counts as zero
  float* scale;  // on the device: [matrices] with has_scales, else one for all matrices
  int rows, columns;
  bool has_scales;
};

// A batch of floats or bfloat16, and the destination of its fp16 parts.
struct SplitEntry {
  const void* x;
  SplitFp16 split;
  unsigned* largest;  // magnitude of x, as float bits, which order like the floats
  int matrices;
  int first_tile;
  ElementType type;
  // x is [matrices, order, order], and the parts have zeros in the rows and columns beyond. 0: x
  // has the sizes of its parts.
  int order = 0;
};
constexpr int64_t kSplitTile = 1 << 13;  // elements

// *largest <- max(*largest, the largest magnitude on the diagonals) of square matrices. One tile
// per matrix.
cudaError_t find_largest_on_diagonals(const Table<SplitEntry>& entries, cudaStream_t stream);

// Writes hi, lo and *scale; no element exceeds twice *largest. A tile has kSplitTile elements of a
// batch.
cudaError_t split_fp16(const Table<SplitEntry>& entries, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
