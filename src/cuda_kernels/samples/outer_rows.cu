#include "cuda_kernels/samples/outer_rows.h"

#include <limits>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kStores = 4;  // per thread

__device__ float scaled(float x, float factor) { return x * factor; }
__device__ float4 scaled(const float4& x, float factor) {
  return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}

// A block stores some elements of a sample, in vectors that do not cross the end of a row.
template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    outer_rows_kernel(const __grid_constant__ OuterRows p, int blocks_of_sample) {
  const int sample = static_cast<int>(blockIdx.x) / blocks_of_sample;
  const int block = static_cast<int>(blockIdx.x) - sample * blocks_of_sample;
  constexpr int kWidth = sizeof(Vector) / sizeof(float);
  const int columns = p.pair.fan_in / kWidth, size = columns * p.pair.fan_out;
  const auto* A = reinterpret_cast<const Vector*>(p.pair.A + sample * p.pair.A_pitch);
  const float* G = p.pair.G + sample * p.pair.G_pitch;
  const float weight = p.weights == nullptr ? 1.0f : p.weights[sample];
  Vector* rows = reinterpret_cast<Vector*>(p.rows) + int64_t{sample} * size;
#pragma unroll
  for (int k = 0; k < kStores; ++k) {
    const int i = (block * kStores + k) * kThreads + static_cast<int>(threadIdx.x);
    if (i >= size) return;
    const int row = i / columns;
    __stcs(rows + i, scaled(A[i - row * columns], weight * G[row]));
  }
}

template <typename Vector>
cudaError_t launch(const OuterRows& p, cudaStream_t stream) {
  constexpr int64_t kOfBlock = int64_t{kThreads} * kStores * (sizeof(Vector) / sizeof(float));
  const int64_t size = int64_t{p.pair.fan_in} * p.pair.fan_out;
  const int64_t blocks = (size + kOfBlock - 1) / kOfBlock;
  constexpr int kMost = std::numeric_limits<int>::max();
  if (size > kMost - kOfBlock || p.samples * blocks > kMost) return cudaErrorInvalidValue;
  outer_rows_kernel<Vector><<<static_cast<unsigned>(p.samples * blocks), kThreads, 0, stream>>>(
      p, static_cast<int>(blocks));
  return cudaGetLastError();
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

cudaError_t outer_rows(const OuterRows& p, cudaStream_t stream) {
  if (p.samples == 0 || p.pair.fan_in == 0 || p.pair.fan_out == 0) return cudaSuccess;
  const bool has_vectors = p.pair.fan_in % 4 == 0 && p.pair.A_pitch % 4 == 0 &&
                           is_aligned(p.pair.A) && is_aligned(p.rows);
  return has_vectors ? launch<float4>(p, stream) : launch<float>(p, stream);
}

}  // namespace torchium::cuda_kernels
