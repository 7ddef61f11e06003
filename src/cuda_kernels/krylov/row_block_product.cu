#include "cuda_kernels/common/warp_sums.cuh"
#include "cuda_kernels/krylov/row_block_product.h"

#include <cstring>

namespace torchium::cuda_kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kRows = 4;    // of A, per warp: each load of X serves all of them
constexpr int kInStep = 4;  // iterations after which the warps wait for each other

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T lane[N];
};

// A is read once: it must not displace X in the caches.
template <typename T, int N>
__device__ Pack<T, N> load_once(const T* address) {
  Pack<T, N> pack;
  if constexpr (sizeof(pack) == 16) {
    const int4 bits = __ldcs(reinterpret_cast<const int4*>(address));
    memcpy(&pack, &bits, sizeof(pack));
  } else {
    pack.lane[0] = __ldcs(address);
  }
  return pack;
}

// One warp computes kRows rows of A times B rows of X; rows from m and `count` on repeat the last
// ones. The warps of a block keep step, so that all read a part of X while it is in the L1 cache.
template <typename T, int N, int B>
__global__ void __launch_bounds__(32 * kWarps, 2)
    row_block_product_kernel(const T* A, const T* X, T* Y, int64_t m, int64_t n, int count) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * kRows;
  const T* a[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) a[r] = A + (first + r < m ? first + r : m - 1) * n;
  const T* x[B];
#pragma unroll
  for (int k = 0; k < B; ++k) x[k] = X + int64_t{min(k, count - 1)} * n;

  T sum[kRows][B] = {};
  const auto add = [&](int64_t c) {
    Pack<T, N> of_A[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) of_A[r] = load_once<T, N>(a[r] + c);
#pragma unroll
    for (int k = 0; k < B; ++k) {
      const Pack<T, N> of_X = *reinterpret_cast<const Pack<T, N>*>(x[k] + c);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int l = 0; l < N; ++l) {
          sum[r][k] = fma(of_A[r].lane[l], of_X.lane[l], sum[r][k]);
        }
      }
    }
  };
  constexpr int kColumns = 32 * N;
  int64_t c = lane * N;
  for (int64_t left = n / (kInStep * kColumns); left > 0; --left) {
#pragma unroll
    for (int i = 0; i < kInStep; ++i, c += kColumns) add(c);
    __syncthreads();
  }
  for (; c < n; c += kColumns) add(c);

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < B; ++k) {
      const T total = warp_sum(sum[r][k]);
      if (lane == 0 && first + r < m && k < count) Y[k * m + first + r] = total;
    }
  }
}

template <typename T, int N>
void launch(const T* A, const T* X, T* Y, int64_t m, int64_t n, int count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((m + kWarps * kRows - 1) / (kWarps * kRows));
  const auto kernel = count <= 1   ? row_block_product_kernel<T, N, 1>
                      : count <= 2 ? row_block_product_kernel<T, N, 2>
                      : count <= 4 ? row_block_product_kernel<T, N, 4>
                                   : row_block_product_kernel<T, N, 8>;
  kernel<<<blocks, 32 * kWarps, 0, stream>>>(A, X, Y, m, n, count);
}

}  // namespace

template <typename T>
void row_block_product(const T* A, const T* X, T* Y, int64_t m, int64_t n, int count,
                       cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  const auto address = reinterpret_cast<uintptr_t>(A) | reinterpret_cast<uintptr_t>(X);
  if (address % 16 == 0 && n % kVector == 0) {
    launch<T, kVector>(A, X, Y, m, n, count, stream);
  } else {
    launch<T, 1>(A, X, Y, m, n, count, stream);
  }
}

template void row_block_product(const float*, const float*, float*, int64_t, int64_t, int,
                                cudaStream_t);
template void row_block_product(const double*, const double*, double*, int64_t, int64_t, int,
                                cudaStream_t);

}  // namespace torchium::cuda_kernels
