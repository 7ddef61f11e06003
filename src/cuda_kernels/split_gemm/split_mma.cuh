// Tensor-core products of nearly float32 precision: hi hi + (hi lo + lo hi) / 2^11, accumulated in
// float32, where hi = fp16(x) and lo = fp16((x - hi) 2^11) for a float x (Ootomo and Yokota 2022,
// arXiv 2203.03341).
#pragma once

#include "cuda_kernels/common/shared_address.cuh"
#include "cuda_kernels/split_gemm/split_fp16.h"
#include "cuda_kernels/split_gemm/split_matrices.h"

#include <cstdint>
#include <cuda_fp16.h>

namespace torchium::cuda_kernels {

__device__ inline void split(float x, __half& hi, __half& lo) {
  hi = __float2half_rn(x);
  lo = __float2half_rn((x - __half2float(hi)) * kLowScale);
}

// lo is kSplitPadding after hi.
__device__ inline void store_split(__half* hi, float x) { split(x, hi[0], hi[kSplitPadding]); }

__device__ inline float join(__half hi, __half lo) {
  return fmaf(__half2float(lo), 1.0f / kLowScale, __half2float(hi));
}

__device__ inline float2 join_pair(uint32_t hi, uint32_t lo) {
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&hi));
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&lo));
  return {fmaf(low.x, 1.0f / kLowScale, high.x), fmaf(low.y, 1.0f / kLowScale, high.y)};
}

// hi and lo of two floats, as pairs of fp16 numbers.
__device__ inline void split_pair(float x, float y, uint32_t& hi, uint32_t& lo) {
  const __half2 high = __floats2half2_rn(x, y);
  const float2 rounded = __half22float2(high);
  const __half2 low = __floats2half2_rn((x - rounded.x) * kLowScale, (y - rounded.y) * kLowScale);
  hi = *reinterpret_cast<const uint32_t*>(&high);
  lo = *reinterpret_cast<const uint32_t*>(&low);
}

// Eight consecutive elements within 32 columns; lo is kSplitPadding after hi.
__device__ inline void load_eight(const __half* hi, float (&x)[8]) {
  const uint4 high = *reinterpret_cast<const uint4*>(hi);
  const uint4 low = *reinterpret_cast<const uint4*>(hi + kSplitPadding);
  const uint32_t pairs[2][4] = {{high.x, high.y, high.z, high.w}, {low.x, low.y, low.z, low.w}};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = join_pair(pairs[0][i], pairs[1][i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

template <bool has_low = true>
__device__ inline void store_eight(__half* hi, const float (&x)[8]) {
  uint4 high, low;
  split_pair(x[0], x[1], high.x, low.x);
  split_pair(x[2], x[3], high.y, low.y);
  split_pair(x[4], x[5], high.z, low.z);
  split_pair(x[6], x[7], high.w, low.w);
  *reinterpret_cast<uint4*>(hi) = high;
  if (has_low) *reinterpret_cast<uint4*>(hi + kSplitPadding) = low;
}

__device__ inline void store_split(__half* hi, __half* lo, float x, float y) {
  uint32_t high, low;
  split_pair(x, y, high, low);
  *reinterpret_cast<uint32_t*>(hi) = high;
  *reinterpret_cast<uint32_t*>(lo) = low;
}

// Four 8 x 8 fp16 matrices; lane i passes the address of row i % 8 of matrix i / 8.
template <bool is_transposed = false>
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t row) {
  if (is_transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  }
}
template <bool is_transposed = false>
__device__ inline void load_matrices(uint32_t (&r)[4], const __half* row) {
  load_matrices<is_transposed>(r, shared_address(row));
}

#if __CUDA_ARCH__ >= 900
// The inverse, from r[0] to r[3].
template <bool is_transposed>
__device__ inline void store_matrices(uint32_t row, const uint32_t* r) {
  if (is_transposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  }
}
#endif

// c += a b: 16 x 16 times 16 x 8.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace torchium::cuda_kernels
