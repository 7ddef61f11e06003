// out = a * b + c, elementwise.
#pragma once

#include "cuda_kernels/common/parameter_table.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// n contiguous elements each; out may be one of the inputs. T: float, double, __half or
// __nv_bfloat16; the last two are computed in float and rounded once. Arrays aligned to 16 bytes
// are accessed in 16-byte vectors. The caller checks cudaGetLastError().
template <typename T>
void fused_mul_add(const T* a, const T* b, const T* c, T* out, int64_t n, cudaStream_t stream);

extern template void fused_mul_add(const float*, const float*, const float*, float*, int64_t,
                                   cudaStream_t);
extern template void fused_mul_add(const double*, const double*, const double*, double*, int64_t,
                                   cudaStream_t);
extern template void fused_mul_add(const __half*, const __half*, const __half*, __half*, int64_t,
                                   cudaStream_t);
extern template void fused_mul_add(const __nv_bfloat16*, const __nv_bfloat16*, const __nv_bfloat16*,
                                   __nv_bfloat16*, int64_t, cudaStream_t);

// c = a * b + c for an entry of a list; contiguous, of one type.
struct MulAddEntry {
  const void *a, *b;
  void* c;
  int64_t elements;
  int first_tile;
  ElementType type;
  bool is_aligned;  // to 16 bytes
};

constexpr int64_t kMulAddTile = 4096;  // elements of one tile

// All entries in one launch, of the rounding of fused_mul_add. Returns the launch error.
cudaError_t fused_mul_add_lists(const Table<MulAddEntry>& entries, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
