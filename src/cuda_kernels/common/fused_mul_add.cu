#include "cuda_kernels/common/element_access.cuh"
#include "cuda_kernels/common/fused_mul_add.h"

#include <algorithm>
#include <cstdint>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;
constexpr int kVectorsPerThread = 2;  // loads in flight before the first use

template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T lane[N];
};

__device__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }
__device__ __half multiply_add(__half a, __half b, __half c) {
  return __float2half_rn(fmaf(__half2float(a), __half2float(b), __half2float(c)));
}
__device__ __nv_bfloat16 multiply_add(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __float2bfloat16_rn(fmaf(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}

// Each block processes kThreads * kVectorsPerThread consecutive vectors; one thread processes the
// array's last, partial vector element by element.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    fused_mul_add_kernel(const T* a, const T* b, const T* c, T* out, int64_t n) {
  using Pack = Vector<T, N>;
  const int64_t packs = n / N;
  const int64_t first = int64_t{blockIdx.x} * kThreads * kVectorsPerThread + threadIdx.x;

  Pack x[kVectorsPerThread], y[kVectorsPerThread], z[kVectorsPerThread];
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
    const int64_t i = first + v * kThreads;
    if (i < packs) {
      x[v] = reinterpret_cast<const Pack*>(a)[i];
      y[v] = reinterpret_cast<const Pack*>(b)[i];
      z[v] = reinterpret_cast<const Pack*>(c)[i];
    }
  }
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
    const int64_t i = first + v * kThreads;
    if (i < packs) {
#pragma unroll
      for (int lane = 0; lane < N; ++lane) {
        z[v].lane[lane] = multiply_add(x[v].lane[lane], y[v].lane[lane], z[v].lane[lane]);
      }
      reinterpret_cast<Pack*>(out)[i] = z[v];
    }
  }
  if (first == 0) {
    for (int64_t i = packs * N; i < n; ++i) out[i] = multiply_add(a[i], b[i], c[i]);
  }
}

template <typename T, int N>
void launch(const T* a, const T* b, const T* c, T* out, int64_t n, cudaStream_t stream) {
  const int64_t packs_per_block = int64_t{kThreads} * kVectorsPerThread;
  const int64_t blocks = std::max<int64_t>(1, (n / N + packs_per_block - 1) / packs_per_block);
  fused_mul_add_kernel<T, N>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a, b, c, out, n);
}

template <typename T, int N>
__device__ void add_products(const MulAddEntry& entry, int64_t begin, int64_t end) {
  using Pack = Vector<T, N>;
  const auto* a = static_cast<const T*>(entry.a);
  const auto* b = static_cast<const T*>(entry.b);
  auto* c = static_cast<T*>(entry.c);
  const int64_t packs_end = begin + (end - begin) / N * N;
  for (int64_t i = begin + int64_t{N} * threadIdx.x; i < packs_end; i += N * kElementThreads) {
    const Pack x = *reinterpret_cast<const Pack*>(a + i);
    const Pack y = *reinterpret_cast<const Pack*>(b + i);
    Pack z = *reinterpret_cast<const Pack*>(c + i);
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      z.lane[lane] = multiply_add(x.lane[lane], y.lane[lane], z.lane[lane]);
    }
    *reinterpret_cast<Pack*>(c + i) = z;
  }
  for (int64_t i = packs_end + threadIdx.x; i < end; i += kElementThreads) {
    c[i] = multiply_add(a[i], b[i], c[i]);
  }
}

template <typename T>
__device__ void add_products(const MulAddEntry& entry, int64_t begin, int64_t end) {
  if (entry.is_aligned) {
    add_products<T, kVectorBytes / sizeof(T)>(entry, begin, end);
  } else {
    add_products<T, 1>(entry, begin, end);
  }
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    fused_mul_add_lists_kernel(const __grid_constant__ Table<MulAddEntry, bytes> entries) {
  const int tile = entries.first_tile + static_cast<int>(blockIdx.x);
  const MulAddEntry& entry = entry_of_tile(entries, tile);
  const int64_t begin = (tile - entry.first_tile) * kMulAddTile;
  const int64_t end = min(begin + kMulAddTile, entry.elements);
  switch (entry.type) {
    case ElementType::kFloat:
      return add_products<float>(entry, begin, end);
    case ElementType::kDouble:
      return add_products<double>(entry, begin, end);
    case ElementType::kHalf:
      return add_products<__half>(entry, begin, end);
    case ElementType::kBFloat16:
      return add_products<__nv_bfloat16>(entry, begin, end);
  }
}

}  // namespace

cudaError_t fused_mul_add_lists(const Table<MulAddEntry>& entries, cudaStream_t stream) {
  return launch_shortest(entries, [&](const auto& table) {
    fused_mul_add_lists_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table);
  });
}

template <typename T>
void fused_mul_add(const T* a, const T* b, const T* c, T* out, int64_t n, cudaStream_t stream) {
  if (n == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                       reinterpret_cast<uintptr_t>(c) | reinterpret_cast<uintptr_t>(out);
  if (address % kVectorBytes == 0) {
    launch<T, kVectorBytes / sizeof(T)>(a, b, c, out, n, stream);
  } else {
    launch<T, 1>(a, b, c, out, n, stream);
  }
}

template void fused_mul_add(const float*, const float*, const float*, float*, int64_t,
                            cudaStream_t);
template void fused_mul_add(const double*, const double*, const double*, double*, int64_t,
                            cudaStream_t);
template void fused_mul_add(const __half*, const __half*, const __half*, __half*, int64_t,
                            cudaStream_t);
template void fused_mul_add(const __nv_bfloat16*, const __nv_bfloat16*, const __nv_bfloat16*,
                            __nv_bfloat16*, int64_t, cudaStream_t);

}  // namespace torchium::cuda_kernels
