// Loads and stores of one or four consecutive elements of several types, and block-wide sums.
#pragma once

#include "cuda_kernels/common/parameter_table.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace torchium::cuda_kernels {

// N consecutive elements; for N = 4 aligned to four elements.
template <int N>
struct Lanes {
  float lane[N];
};

template <int N>
__device__ Lanes<N> load_floats(const float* data, int64_t offset) {
  Lanes<N> x;
  if constexpr (N == 4) {
    const float4 four = *reinterpret_cast<const float4*>(data + offset);
    x.lane[0] = four.x;
    x.lane[1] = four.y;
    x.lane[2] = four.z;
    x.lane[3] = four.w;
  } else {
    x.lane[0] = data[offset];
  }
  return x;
}

template <int N>
__device__ void store_floats(float* data, int64_t offset, const Lanes<N>& x) {
  if constexpr (N == 4) {
    *reinterpret_cast<float4*>(data + offset) = {x.lane[0], x.lane[1], x.lane[2], x.lane[3]};
  } else {
    data[offset] = x.lane[0];
  }
}

// The same for 16-bit elements.
template <int N, typename Half>
__device__ Lanes<N> load_fp16(const void* data, int64_t offset) {
  Lanes<N> x;
  const auto* elements = static_cast<const Half*>(data) + offset;
  if constexpr (N == 4) {
    const uint2 bits = *reinterpret_cast<const uint2*>(elements);
    const auto* four = reinterpret_cast<const Half*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) x.lane[i] = static_cast<float>(four[i]);
  } else {
    x.lane[0] = static_cast<float>(*elements);
  }
  return x;
}

template <int N, typename Half>
__device__ void store_fp16(void* data, int64_t offset, const Lanes<N>& x) {
  auto* elements = static_cast<Half*>(data) + offset;
  if constexpr (N == 4) {
    uint2 bits;
    auto* four = reinterpret_cast<Half*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = static_cast<Half>(x.lane[i]);
    *reinterpret_cast<uint2*>(elements) = bits;
  } else {
    *elements = static_cast<Half>(x.lane[0]);
  }
}

template <int N>
__device__ Lanes<N> load_elements(const void* data, ElementType type, int64_t offset) {
  switch (type) {
    case ElementType::kBFloat16:
      return load_fp16<N, __nv_bfloat16>(data, offset);
    case ElementType::kHalf:
      return load_fp16<N, __half>(data, offset);
    default:
      return load_floats<N>(static_cast<const float*>(data), offset);
  }
}

template <int N>
__device__ void store_elements(void* data, ElementType type, int64_t offset, const Lanes<N>& x) {
  switch (type) {
    case ElementType::kBFloat16:
      return store_fp16<N, __nv_bfloat16>(data, offset, x);
    case ElementType::kHalf:
      return store_fp16<N, __half>(data, offset, x);
    default:
      return store_floats<N>(static_cast<float*>(data), offset, x);
  }
}

// The entry that owns a tile.
template <typename Entry, int bytes>
__device__ const Entry& entry_of_tile(const Table<Entry, bytes>& table, int tile) {
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table.entries[middle].first_tile <= tile ? low : high) = middle;
  }
  return table.entries[low];
}

constexpr int kElementThreads = 256;

// The sum over the block, in thread 0, in a fixed order.
__device__ inline float sum_of_block(float x) {
  __shared__ float warps[kElementThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < kElementThreads / 32; ++warp) x += warps[warp];
  }
  return x;
}

}  // namespace torchium::cuda_kernels
