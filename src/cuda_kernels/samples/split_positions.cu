#include "cuda_kernels/samples/split_positions.h"
#include "cuda_kernels/split_gemm/split_fp16.cuh"
#include "cuda_kernels/split_gemm/split_mma.cuh"

#include <algorithm>
#include <cfloat>
#include <limits>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLoads = 32;  // elements per thread that looks for the largest
constexpr int kStrip = 64;  // positions of a warp, two per thread
constexpr int kOutside = 1 << 30;

// One launch for both operands: blocks from first_blocks[1] on belong to the second.
struct Operands {
  SplitPositions each[2];
  int first_blocks[2];
  int samples;
};

// The operand of this block, and the number of the block among its own.
struct Place {
  int operand, block;

  __device__ explicit Place(const Operands& operands)
      : operand(static_cast<int>(blockIdx.x) >= operands.first_blocks[1] ? 1 : 0),
        block(static_cast<int>(blockIdx.x) - operands.first_blocks[operand]) {}
};

int blocks_for(int64_t threads) { return static_cast<int>((threads + kThreads - 1) / kThreads); }

__host__ __device__ int elements_of_sample(const SplitPositions& p) {
  return p.channels * p.size[0] * p.size[1];
}

// Whether four elements of an image can be loaded at once.
__host__ __device__ bool is_aligned(const SplitPositions& p) {
  return reinterpret_cast<uintptr_t>(p.images) % 16 == 0 && p.strides[0] % 4 == 0 &&
         p.size[0] * p.size[1] % 4 == 0;
}

// Whether the images are the vectors, in their order and without gaps.
__host__ __device__ bool is_plain(const SplitPositions& p) {
  return is_aligned(p) && p.strides[3] == 1 && p.strides[2] == p.size[1] &&
         p.parts.rows == p.channels && p.parts.columns == p.size[0] * p.size[1] &&
         p.strides[1] == p.parts.columns && p.output_size[0] == p.size[0] &&
         p.output_size[1] == p.size[1] && p.padding[0] == 0 && p.padding[1] == 0 &&
         p.stride[0] == 1 && p.stride[1] == 1;
}

// ---- the largest magnitude of each sample

__device__ unsigned largest_of(const float4& x) {
  return max(max(magnitude_bits(x.x), magnitude_bits(x.y)),
             max(magnitude_bits(x.z), magnitude_bits(x.w)));
}

// A block looks at some elements of a sample.
__device__ void find_largest(const SplitPositions& p, int block) {
  constexpr int kBlock = kThreads * kLoads;
  const int size = elements_of_sample(p), blocks = (size + kBlock - 1) / kBlock;
  const int sample = block / blocks, first = (block - sample * blocks) * kBlock;
  const float* x = p.images + sample * p.strides[0];
  const int thread = static_cast<int>(threadIdx.x);
  unsigned most = 0;
  if (is_aligned(p)) {
#pragma unroll
    for (int k = 0; k < kLoads; k += 4) {
      const int i = first + k * kThreads + 4 * thread;
      if (i < size) most = max(most, largest_of(*reinterpret_cast<const float4*>(x + i)));
    }
  } else {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int i = first + k * kThreads + thread;
      if (i < size) most = max(most, magnitude_bits(x[i]));
    }
  }
  record_largest(most, p.largest + sample);
}

// The largest magnitude and the sum of some of the elements of a channel.
struct LargestAndSum {
  unsigned most = 0;
  float sum = 0;
};

// A group of lanes looks at one channel at a time, and adds up its elements.
constexpr int kGroup = 8;
constexpr int kChannelsOfWarp = 32 / kGroup * 4;  // of a sample

// Of the elements that this lane of a group has.
__device__ LargestAndSum largest_and_sum(const float* x, int size, bool is_aligned, int lane) {
  LargestAndSum result;
  if (is_aligned) {
#pragma unroll 8
    for (int i = 4 * lane; i < size; i += 4 * kGroup) {
      const float4 four = *reinterpret_cast<const float4*>(x + i);
      result.most = max(result.most, largest_of(four));
      result.sum += four.x + four.y + (four.z + four.w);
    }
  } else {
#pragma unroll 8
    for (int i = lane; i < size; i += kGroup) {
      result.most = max(result.most, magnitude_bits(x[i]));
      result.sum += x[i];
    }
  }
  return result;
}

__host__ __device__ int warps_of_sample(const SplitPositions& p) {
  return (p.channels + kChannelsOfWarp - 1) / kChannelsOfWarp;
}

__device__ void find_largest_and_sum(const SplitPositions& p, int samples, int block) {
  const int warp = block * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int sample = warp / warps_of_sample(p);
  if (sample >= samples) return;
  const int size = p.size[0] * p.size[1];
  const int first = (warp - sample * warps_of_sample(p)) * kChannelsOfWarp + lane / kGroup;
  const float* images = p.images + sample * p.strides[0];
  unsigned most = 0;
#pragma unroll 4
  for (int k = 0; k < kChannelsOfWarp; k += 32 / kGroup) {
    const int channel = first + k;
    LargestAndSum x;
    if (channel < p.channels) {
      x = largest_and_sum(images + int64_t{channel} * size, size, is_aligned(p), lane % kGroup);
    }
#pragma unroll
    for (int offset = kGroup / 2; offset > 0; offset /= 2) {
      x.sum += __shfl_xor_sync(0xffffffff, x.sum, offset);
    }
    if (lane % kGroup == 0 && channel < p.channels) {
      p.sums[int64_t{sample} * p.channels + channel] = x.sum;
    }
    most = max(most, x.most);
  }
  record_largest(most, p.largest + sample);
}

__global__ void __launch_bounds__(kThreads)
    find_largest_kernel(const __grid_constant__ Operands operands) {
  const Place place(operands);
  const SplitPositions& p = operands.each[place.operand];
  if (p.sums == nullptr) {
    find_largest(p, place.block);
  } else {
    find_largest_and_sum(p, operands.samples, place.block);
  }
}

int64_t blocks_to_find_largest(const SplitPositions& p, int samples) {
  return p.sums == nullptr
             ? int64_t{samples} * blocks_for((elements_of_sample(p) + kLoads - 1) / kLoads)
             : (int64_t{samples} * warps_of_sample(p) + kWarps - 1) / kWarps;
}

// ---- parts

__device__ float scale_of(const SplitPositions& p, int sample) {
  // A magnitude that is no number makes the result none, whatever the scale is.
  const float largest = __uint_as_float(p.largest[sample]);
  return scale_for(largest <= FLT_MAX ? largest : FLT_MAX);
}

// A thread splits four elements.
__device__ void split_plain(const SplitPositions& p, int samples, unsigned thread) {
  const auto fours = static_cast<unsigned>(elements_of_sample(p) / 4);
  const int sample = static_cast<int>(thread / fours);
  if (sample >= samples) return;
  const unsigned i = 4 * (thread - static_cast<unsigned>(sample) * fours);
  const float scale = scale_of(p, sample);
  if (i == 0) p.parts.scale[sample] = scale;
  const float4 x = *reinterpret_cast<const float4*>(p.images + sample * p.strides[0] + i);
  uint2 hi, lo;
  split_pair(x.x * scale, x.y * scale, hi.x, lo.x);
  split_pair(x.z * scale, x.w * scale, hi.y, lo.y);
  const int64_t target = int64_t{sample} * elements_of_sample(p) + i;
  *reinterpret_cast<uint2*>(p.parts.hi + target) = hi;
  *reinterpret_cast<uint2*>(p.parts.lo + target) = lo;
}

// The pixel that the first element of the kernel meets at a position.
struct Pixel {
  int y, x;

  __device__ Pixel(const SplitPositions& p, int position) {
    const int row = position / p.output_size[1], column = position - row * p.output_size[1];
    y = row < p.output_size[0] ? row * p.stride[0] - p.padding[0] : kOutside;
    x = column * p.stride[1] - p.padding[1];
  }

  // Of the element of the kernel that is this far away; zero outside of the image.
  __device__ float load(const SplitPositions& p, const float* image, int below, int right) const {
    const int row = y + below, column = x + right;
    const bool inside = static_cast<unsigned>(row) < static_cast<unsigned>(p.size[0]) &&
                        static_cast<unsigned>(column) < static_cast<unsigned>(p.size[1]);
    return inside ? image[row * static_cast<int>(p.strides[2]) +
                          column * static_cast<int>(p.strides[3])]
                  : 0.0f;
  }
};

__host__ __device__ int strips_of(const SplitPositions& p) {
  return (p.parts.columns + kStrip - 1) / kStrip;
}

// A warp splits the elements of a strip of positions for all elements of the kernel of a channel.
__device__ void split_patches(const SplitPositions& p, int samples, unsigned thread) {
  const auto strips = static_cast<unsigned>(strips_of(p));
  const unsigned warp = thread / 32, plane = warp / strips;
  const int sample = static_cast<int>(plane / static_cast<unsigned>(p.channels));
  const int channel = static_cast<int>(plane) - sample * p.channels;
  const int position = static_cast<int>((warp - plane * strips) * kStrip + 2 * (thread % 32));
  if (sample >= samples || position >= p.parts.columns) return;
  const float scale = scale_of(p, sample);
  if (channel == 0 && position == 0) p.parts.scale[sample] = scale;
  const float* image = p.images + sample * p.strides[0] + channel * p.strides[1];
  const int patch = p.kernel[0] * p.kernel[1];
  int64_t target = (int64_t{sample} * p.parts.rows + channel * patch) * p.parts.columns + position;
  const Pixel first(p, position), second(p, position + 1);
  for (int row = 0; row < p.kernel[0]; ++row) {
    const int below = row * p.dilation[0];
#pragma unroll 3
    for (int column = 0; column < p.kernel[1]; ++column) {
      const int right = column * p.dilation[1];
      store_split(p.parts.hi + target, p.parts.lo + target,
                  first.load(p, image, below, right) * scale,
                  second.load(p, image, below, right) * scale);
      target += p.parts.columns;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    split_positions_kernel(const __grid_constant__ Operands operands) {
  const Place place(operands);
  const SplitPositions& p = operands.each[place.operand];
  const unsigned thread = static_cast<unsigned>(place.block) * kThreads + threadIdx.x;
  if (is_plain(p)) {
    split_plain(p, operands.samples, thread);
  } else {
    split_patches(p, operands.samples, thread);
  }
}

int64_t threads_to_split(const SplitPositions& p, int samples) {
  return is_plain(p) ? int64_t{samples} * (elements_of_sample(p) / 4)
                     : int64_t{samples} * p.channels * strips_of(p) * 32;
}

}  // namespace

cudaError_t split_positions(const SplitPositions& A, const SplitPositions& G, int samples,
                            cudaStream_t stream) {
  const int64_t blocks_A = blocks_to_find_largest(A, samples);
  const int64_t blocks_G = blocks_to_find_largest(G, samples);
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (std::max({threads_to_split(A, samples), threads_to_split(G, samples), blocks_A + blocks_G}) >
      kMost) {
    return cudaErrorInvalidValue;
  }
  Operands operands{{A, G}, {0, static_cast<int>(blocks_A)}, samples};
  find_largest_kernel<<<static_cast<unsigned>(blocks_A + blocks_G), kThreads, 0, stream>>>(
      operands);
  operands.first_blocks[1] = blocks_for(threads_to_split(A, samples));
  split_positions_kernel<<<operands.first_blocks[1] + blocks_for(threads_to_split(G, samples)),
                           kThreads, 0, stream>>>(operands);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
