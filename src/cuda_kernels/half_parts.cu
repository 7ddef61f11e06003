#include "cuda_kernels/half_parts.cuh"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

constexpr int64_t kMostBlocks = 2048;

template <int N>
__global__ void __launch_bounds__(kElementThreads)
    find_largest_kernel(const float* x, int64_t lanes, unsigned* largest) {
  unsigned most = 0;
  const int64_t step = int64_t{gridDim.x} * kElementThreads;
  for (int64_t i = int64_t{blockIdx.x} * kElementThreads + threadIdx.x; i < lanes; i += step) {
    const Lanes<N> values = load_floats<N>(x, N * i);
#pragma unroll
    for (int j = 0; j < N; ++j) most = max(most, magnitude_bits(values.lane[j]));
  }
  record_largest(most, largest);
}

__global__ void __launch_bounds__(kElementThreads)
    find_largest_on_diagonals_kernel(const void* x, ElementType type, int64_t n,
                                     unsigned* largest) {
  const int64_t first = int64_t{blockIdx.x} * n * n;
  unsigned most = 0;
  for (int64_t i = threadIdx.x; i < n; i += kElementThreads) {
    most = max(most, magnitude_bits(load_elements<1>(x, type, first + i * (n + 1)).lane[0]));
  }
  record_largest(most, largest);
}

template <int N>
__global__ void __launch_bounds__(kElementThreads)
    split_halves_kernel(const void* x, ElementType type, int64_t lanes, const unsigned* largest,
                        __half* hi, __half* lo, float* scale) {
  // Entries off the diagonal of a positive matrix are no larger than those on it but for rounding.
  const float factor = scale_for(2 * __uint_as_float(*largest));
  const int64_t index = int64_t{blockIdx.x} * kElementThreads + threadIdx.x;
  if (index == 0) *scale = factor;
  if (index < lanes) {
    store_parts<N>(hi, lo, index * N, load_elements<N>(x, type, index * N), factor);
  }
}

template <int N>
void launch_split(const void* x, ElementType type, int64_t elements, const unsigned* largest,
                  __half* hi, __half* lo, float* scale, cudaStream_t stream) {
  const int64_t lanes = elements / N;
  const auto blocks = static_cast<unsigned>((lanes + kElementThreads - 1) / kElementThreads);
  split_halves_kernel<N>
      <<<blocks, kElementThreads, 0, stream>>>(x, type, lanes, largest, hi, lo, scale);
}

__global__ void undo_scales_kernel(const float* first, const float* second, float* coefficients) {
  const double product = double{*first} * *second;
  coefficients[0] = static_cast<float>(1 / product);
  coefficients[1] = static_cast<float>(1 / (product * kLowHalfScale));
  coefficients[2] = 0;
  coefficients[3] = 1;
}

bool is_aligned(const void* data, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

}  // namespace

cudaError_t find_largest(const float* x, int64_t elements, unsigned* largest, cudaStream_t stream) {
  const bool by_fours = elements % 4 == 0 && is_aligned(x, sizeof(float4));
  const int64_t lanes = by_fours ? elements / 4 : elements;
  const auto blocks = static_cast<unsigned>(
      std::clamp<int64_t>((lanes + kElementThreads - 1) / kElementThreads, 1, kMostBlocks));
  cudaError_t error = cudaMemsetAsync(largest, 0, sizeof(unsigned), stream);
  if (error != cudaSuccess) return error;
  if (by_fours) {
    find_largest_kernel<4><<<blocks, kElementThreads, 0, stream>>>(x, lanes, largest);
  } else {
    find_largest_kernel<1><<<blocks, kElementThreads, 0, stream>>>(x, lanes, largest);
  }
  return cudaGetLastError();
}

cudaError_t find_largest_on_diagonals(const void* x, ElementType type, int64_t matrices, int64_t n,
                                      unsigned* largest, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(largest, 0, sizeof(unsigned), stream);
  if (error != cudaSuccess) return error;
  find_largest_on_diagonals_kernel<<<static_cast<unsigned>(matrices), kElementThreads, 0, stream>>>(
      x, type, n, largest);
  return cudaGetLastError();
}

cudaError_t split_halves(const void* x, ElementType type, int64_t elements, const unsigned* largest,
                         __half* hi, __half* lo, float* scale, cudaStream_t stream) {
  const bool by_fours = elements % 4 == 0 && is_aligned(x, 16) && is_aligned(hi, 8) &&
                        (lo == nullptr || is_aligned(lo, 8));
  if (by_fours) {
    launch_split<4>(x, type, elements, largest, hi, lo, scale, stream);
  } else {
    launch_split<1>(x, type, elements, largest, hi, lo, scale, stream);
  }
  return cudaGetLastError();
}

cudaError_t undo_scales(const float* first, const float* second, float* coefficients,
                        cudaStream_t stream) {
  undo_scales_kernel<<<1, 1, 0, stream>>>(first, second, coefficients);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
