// Sums over the lanes of a warp.
#pragma once

namespace torchium::cuda_kernels {

// The sum, in all lanes.
template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// The sums of the first `count` of V values, a power of two: lane l returns that of value
// l / (32 / count). In each step a lane keeps one half of its values and passes the other half on.
template <int count, int offset = 16, typename T, int V>
__device__ __forceinline__ T warp_sums(T (&values)[V], int lane) {
  if constexpr (count > 1) {
    const bool keeps_upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const T passed = keeps_upper ? values[i] : values[i + count / 2];
      const T kept = keeps_upper ? values[i + count / 2] : values[i];
      values[i] = kept + __shfl_xor_sync(0xffffffffu, passed, offset);
    }
  } else {
    values[0] += __shfl_xor_sync(0xffffffffu, values[0], offset);
  }
  if constexpr (offset > 1) {
    return warp_sums<(count > 1 ? count / 2 : 1), offset / 2>(values, lane);
  } else {
    return values[0];
  }
}

}  // namespace torchium::cuda_kernels
