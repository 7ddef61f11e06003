// Products in nearly float32 precision on tensor cores: a float x is kept as two halves, hi =
// half(x) and lo = half((x - hi) 2^11), and a product is hi hi + (hi lo + lo hi) / 2^11,
// accumulated in float32 (Ootomo and Yokota 2022, arXiv 2203.03341).
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

namespace torchium::cuda_kernels {

constexpr float kLowScale = 2048.0f;

__device__ inline void split(float x, __half& hi, __half& lo) {
  hi = __float2half_rn(x);
  lo = __float2half_rn((x - __half2float(hi)) * kLowScale);
}

__device__ inline float join(__half hi, __half lo) {
  return fmaf(__half2float(lo), 1.0f / kLowScale, __half2float(hi));
}

__device__ inline void store_split(__half* hi, __half* lo, float x, float y) {
  const __half2 high = __floats2half2_rn(x, y);
  const float2 rounded = __half22float2(high);
  *reinterpret_cast<__half2*>(hi) = high;
  *reinterpret_cast<__half2*>(lo) =
      __floats2half2_rn((x - rounded.x) * kLowScale, (y - rounded.y) * kLowScale);
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of halves; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], const __half* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ inline void load_transposed_matrices(uint32_t (&r)[4], const __half* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// c += a b: 16 x 16 times 16 x 8.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace torchium::cuda_kernels
