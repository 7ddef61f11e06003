// The arithmetic of split_fp16.h.
#pragma once

#include "cuda_kernels/common/element_access.cuh"
#include "cuda_kernels/split_gemm/split_fp16.h"

namespace torchium::cuda_kernels {

// The scale for magnitudes up to `bound`: bound s < 2^15.
__device__ inline float scale_for(float bound) {
  if (bound == 0) return 1;
  int exponent = 0;
  frexpf(bound, &exponent);
  return ldexpf(1.0f, min(126, 15 - exponent));
}

// hi and lo of N consecutive elements; lo may be null.
template <int N>
__device__ void store_parts(__half* hi, __half* lo, int64_t offset, Lanes<N> x, float scale) {
  Lanes<N> high;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x.lane[i] *= scale;
    high.lane[i] = __half2float(__float2half_rn(x.lane[i]));
  }
  store_fp16<N, __half>(hi, offset, high);
  if (lo == nullptr) return;
#pragma unroll
  for (int i = 0; i < N; ++i) x.lane[i] = (x.lane[i] - high.lane[i]) * kLowScale;
  store_fp16<N, __half>(lo, offset, x);
}

// Raises *largest to the largest `bits` in a warp. All threads of the warp must call this.
__device__ inline void record_largest(unsigned bits, unsigned* largest) {
  bits = __reduce_max_sync(0xffffffff, bits);
  if (threadIdx.x % 32 == 0 && bits > *largest) atomicMax(largest, bits);
}

__device__ inline unsigned magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffff; }

}  // namespace torchium::cuda_kernels
