#include "cuda_kernels/samples/split_positions.h"
#include "cuda_kernels/split_gemm/split_fp16.cuh"
#include "cuda_kernels/split_gemm/split_mma.cuh"

#include <algorithm>
#include <cfloat>
#include <limits>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 16;  // elements per thread that looks for the largest
constexpr int kVector = 8;  // positions that a thread writes, 16 bytes of each part
constexpr int kOutside = 1 << 30;

// One launch for both operands: blocks from first_blocks[1] on belong to the second.
struct Operands {
  SplitPositions each[2];
  int first_blocks[2];
  int samples;
};

__device__ int operand_of(const Operands& operands) {
  return static_cast<int>(blockIdx.x) >= operands.first_blocks[1] ? 1 : 0;
}

__host__ __device__ int elements_of_sample(const SplitPositions& p) {
  return p.channels * p.size[0] * p.size[1];
}

int blocks_of_sample(const SplitPositions& p) {
  return (elements_of_sample(p) + kThreads * kLoads - 1) / (kThreads * kLoads);
}

// One sample per row of blocks.
__global__ void __launch_bounds__(kThreads)
    find_largest_kernel(const __grid_constant__ Operands operands) {
  const int operand = operand_of(operands);
  const SplitPositions& p = operands.each[operand];
  const int block = static_cast<int>(blockIdx.x) - operands.first_blocks[operand];
  const int size = elements_of_sample(p), first = block * kThreads * kLoads;
  for (int sample = static_cast<int>(blockIdx.y); sample < operands.samples;
       sample += static_cast<int>(gridDim.y)) {
    const float* x = p.images + sample * p.strides[0];
    unsigned most = 0;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int i = first + k * kThreads + static_cast<int>(threadIdx.x);
      if (i < size) most = max(most, magnitude_bits(x[i]));
    }
    record_largest(most, p.largest + sample);
  }
}

// The pixels of the images that one element of the kernel meets at consecutive positions.
struct Pixels {
  int y[kVector], x[kVector];

  __device__ Pixels(const SplitPositions& p, int first) {
    const int width = p.output_size[1], positions = p.output_size[0] * width;
    int row = first / width, column = first - row * width;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      y[i] = first + i < positions ? row * p.stride[0] - p.padding[0] : kOutside;
      x[i] = column * p.stride[1] - p.padding[1];
      if (++column == width) {
        column = 0;
        ++row;
      }
    }
  }
};

// Eight elements of both parts, as 16 bytes each.
__device__ void store_parts(__half* hi, __half* lo, const float (&x)[kVector], float scale) {
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    split_pair(x[2 * i] * scale, x[2 * i + 1] * scale, high[i], low[i]);
  }
  *reinterpret_cast<uint4*>(hi) = {high[0], high[1], high[2], high[3]};
  *reinterpret_cast<uint4*>(lo) = {low[0], low[1], low[2], low[3]};
}

// A thread writes the same eight positions for all elements of the kernel of one channel.
__device__ void split(const SplitPositions& p, int sample, int channel, int first) {
  // A magnitude that is no number makes the result none, whatever the scale is.
  const float largest = __uint_as_float(p.largest[sample]);
  const float scale = scale_for(largest <= FLT_MAX ? largest : FLT_MAX);
  if (channel == 0 && first == 0) p.parts.scale[sample] = scale;
  const float* image = p.images + sample * p.strides[0] + channel * p.strides[1];
  const int patch = p.kernel[0] * p.kernel[1];
  const int64_t begin =
      (int64_t{sample} * p.parts.rows + channel * patch) * p.parts.columns + first;
  __half* hi = p.parts.hi + begin;
  __half* lo = p.parts.lo + begin;
  const Pixels pixels(p, first);
  for (int row = 0; row < p.kernel[0]; ++row) {
    for (int column = 0; column < p.kernel[1]; ++column) {
      float values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const int y = pixels.y[i] + row * p.dilation[0];
        const int x = pixels.x[i] + column * p.dilation[1];
        const bool inside = static_cast<unsigned>(y) < static_cast<unsigned>(p.size[0]) &&
                            static_cast<unsigned>(x) < static_cast<unsigned>(p.size[1]);
        values[i] = inside ? image[y * p.strides[2] + x * p.strides[3]] : 0.0f;
      }
      store_parts(hi, lo, values, scale);
      hi += p.parts.columns;
      lo += p.parts.columns;
    }
  }
}

__device__ __host__ int64_t threads_of(const SplitPositions& p, int samples) {
  return int64_t{samples} * p.channels * (p.parts.columns / kVector);
}

int blocks_of(const SplitPositions& p, int samples) {
  return static_cast<int>((threads_of(p, samples) + kThreads - 1) / kThreads);
}

__global__ void __launch_bounds__(kThreads)
    split_positions_kernel(const __grid_constant__ Operands operands) {
  const int operand = operand_of(operands);
  const SplitPositions& p = operands.each[operand];
  const auto block = static_cast<unsigned>(blockIdx.x) - operands.first_blocks[operand];
  const unsigned thread = block * kThreads + threadIdx.x;
  if (thread >= threads_of(p, operands.samples)) return;
  const auto vectors = static_cast<unsigned>(p.parts.columns / kVector);
  const unsigned plane = thread / vectors, vector = thread - plane * vectors;
  const unsigned sample = plane / static_cast<unsigned>(p.channels);
  split(p, static_cast<int>(sample), static_cast<int>(plane - sample * p.channels),
        static_cast<int>(vector) * kVector);
}

}  // namespace

cudaError_t split_positions(const SplitPositions& A, const SplitPositions& G, int samples,
                            cudaStream_t stream) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (threads_of(A, samples) > kMost || threads_of(G, samples) > kMost) {
    return cudaErrorInvalidValue;
  }
  constexpr int kMostRows = 65535;
  Operands operands{{A, G}, {0, blocks_of_sample(A)}, samples};
  const dim3 blocks(operands.first_blocks[1] + blocks_of_sample(G), std::min(samples, kMostRows));
  find_largest_kernel<<<blocks, kThreads, 0, stream>>>(operands);
  operands.first_blocks[1] = blocks_of(A, samples);
  split_positions_kernel<<<operands.first_blocks[1] + blocks_of(G, samples), kThreads, 0, stream>>>(
      operands);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
