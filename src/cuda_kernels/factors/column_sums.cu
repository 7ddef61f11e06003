#include "cuda_kernels/factors/column_sums.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace torchium::cuda_kernels {
namespace {

constexpr int kVector = 8;   // elements that a thread reads at a time
constexpr int kWidth = 32;   // threads along a row
constexpr int kHeight = 16;  // and across rows

// Block (x, y) adds every kSumParts-th group of kHeight rows, from group y on.
template <typename Element>
__global__ void __launch_bounds__(kWidth* kHeight) sum_kernel(const ColumnSums arguments) {
  __shared__ float partial[kHeight][kWidth * kVector];
  const int column = static_cast<int>(blockIdx.x * kWidth + threadIdx.x) * kVector;
  float sums[kVector]{};
  if (column < arguments.pitch) {
    const auto* first = static_cast<const Element*>(arguments.X) + column;
    for (int64_t row = blockIdx.y * kHeight + threadIdx.y; row < arguments.count;
         row += kSumParts * kHeight) {
      const uint4 vector = *reinterpret_cast<const uint4*>(first + row * arguments.pitch);
      const auto* elements = reinterpret_cast<const Element*>(&vector);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] += static_cast<float>(elements[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) partial[threadIdx.y][threadIdx.x * kVector + i] = sums[i];
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.y * kWidth + threadIdx.x);
  const int place = static_cast<int>(blockIdx.x) * kWidth * kVector + thread;
  if (thread >= kWidth * kVector || place >= arguments.pitch) return;
  float sum = 0;
#pragma unroll
  for (int row = 0; row < kHeight; ++row) sum += partial[row][thread];
  arguments.sums[int64_t{blockIdx.y} * arguments.pitch + place] = sum;
}

}  // namespace

cudaError_t column_sums(const ColumnSums& arguments, cudaStream_t stream) {
  constexpr int kColumns = kWidth * kVector;
  const dim3 blocks((arguments.pitch + kColumns - 1) / kColumns, kSumParts);
  const dim3 threads(kWidth, kHeight);
  if (arguments.is_bfloat16) {
    sum_kernel<__nv_bfloat16><<<blocks, threads, 0, stream>>>(arguments);
  } else {
    sum_kernel<__half><<<blocks, threads, 0, stream>>>(arguments);
  }
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
