#include "cuda_kernels/factors/element_packs.cuh"
#include "cuda_kernels/factors/norm_moments.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kWarp = 32;
constexpr int kChannels = 8, kRows = 64;  // threads of a block: along channels, and across parts
constexpr int kWarps = kChannels * kRows / kWarp, kRowsOfWarp = kWarp / kChannels;
constexpr int kGroupThreads = 128;

// What a channel is normalised by: x^ = scale (x - mean).
struct Normalisation {
  double mean, scale;
};

__device__ double load(const void* data, ElementType type, int64_t i) {
  switch (type) {
    case ElementType::kBFloat16:
      return static_cast<float>(static_cast<const __nv_bfloat16*>(data)[i]);
    case ElementType::kHalf:
      return static_cast<float>(static_cast<const __half*>(data)[i]);
    case ElementType::kDouble:
      return static_cast<const double*>(data)[i];
    default:
      return static_cast<const float*>(data)[i];
  }
}

// One channel in one part.
class PartSums {
 public:
  __device__ PartSums(const NormBlocks& arguments, int part, int channel)
      : first_(arguments.sums + channel), channels_(arguments.input.channels) {
    const bool of_rows = arguments.statistics == NormStatistics::kOfRows;
    first_ += int64_t{part} * (of_rows ? kRowPlanes : kChannelPlanes) * channels_;
  }

  __device__ double operator[](NormPlane plane) const { return first_[plane * channels_]; }

 private:
  const float* first_;
  int64_t channels_;
};

__device__ double positions_of(const NormBlocks& arguments, int part) {
  const int64_t begin =
      part % static_cast<int>(arguments.parts.per_sample) * arguments.parts.positions;
  const int64_t left = arguments.input.positions - begin;
  return static_cast<double>(min(left, arguments.parts.positions));
}

// NaN stays NaN.
__device__ double not_below_zero(double x) { return x < 0 ? 0 : x; }

// Sums of y and y^2, where y is the distance of x from an x.
struct InputSums {
  double y = 0, yy = 0;

  __device__ void add(const PartSums& sums, double positions, double from) {
    const double d = sums[kShift] - from, its = sums[kY];
    y += its + positions * d;
    yy += sums[kYy] + 2 * d * its + positions * d * d;
  }
  // The mean is counted from the same x.
  __device__ Normalisation normalisation(double positions, double eps) const {
    const double mean = y / positions;
    return {mean, 1 / sqrt(not_below_zero(yy / positions - mean * mean) + eps)};
  }
};

template <int first, int end>
__device__ double sum_of_lanes(double value) {
#pragma unroll
  for (int offset = first; offset < end; offset *= 2) {
    value += __shfl_xor_sync(0xffffffff, value, offset);
  }
  return value;
}

// A warp has the channels of one group in one sample.
__global__ void __launch_bounds__(kGroupThreads) groups_kernel(const NormBlocks arguments) {
  const int64_t place =
      static_cast<int64_t>(blockIdx.x) * (kGroupThreads / kWarp) + threadIdx.x / kWarp;
  const int64_t sample = place / arguments.groups;
  if (sample >= arguments.input.samples) return;
  const int per_sample = static_cast<int>(arguments.parts.per_sample);
  const int first_part = static_cast<int>(sample) * per_sample;
  const int channels = arguments.input.channels / arguments.groups;
  const int first_channel = static_cast<int>(place % arguments.groups) * channels;
  const double from = PartSums(arguments, first_part, first_channel)[kShift];
  InputSums sums;
  for (int part = first_part; part < first_part + per_sample; ++part) {
    const double positions = positions_of(arguments, part);
#pragma unroll 4
    for (int c = static_cast<int>(threadIdx.x) % kWarp; c < channels; c += kWarp) {
      sums.add(PartSums(arguments, part, first_channel + c), positions, from);
    }
  }
  sums = {sum_of_lanes<1, kWarp>(sums.y), sum_of_lanes<1, kWarp>(sums.yy)};
  if (threadIdx.x % kWarp != 0) return;
  const Normalisation its =
      sums.normalisation(static_cast<double>(arguments.input.positions) * channels, arguments.eps);
  arguments.of_groups[2 * place] = its.mean + from;
  arguments.of_groups[2 * place + 1] = its.scale;
}

// What a part is normalised by. Statistics of the batch are not known before the sum of all parts:
// until then x counts from the shift of the first part.
__device__ Normalisation normalisation_of(const NormBlocks& arguments, int part, int channel) {
  switch (arguments.statistics) {
    case NormStatistics::kOfBatch:
      return {PartSums(arguments, 0, channel)[kShift], 1};
    case NormStatistics::kGiven: {
      const double variance = load(arguments.variance, arguments.variance_type, channel);
      return {load(arguments.mean, arguments.mean_type, channel),
              1 / sqrt(not_below_zero(variance) + arguments.eps)};
    }
    case NormStatistics::kOfGroups: {
      const int64_t sample = part / static_cast<int>(arguments.parts.per_sample);
      const int group = channel / (arguments.input.channels / arguments.groups);
      const double* its = arguments.of_groups + 2 * (sample * arguments.groups + group);
      return {its[0], its[1]};
    }
    default:
      return {0, 1};
  }
}

// The sums of u^2, u v and v^2, and of what the statistics of the batch are made of.
struct Block {
  double uu = 0, uv = 0, vv = 0;
  InputSums inputs;
};

// The gradients of a sample.
struct Gradients {
  double u = 0, v = 0;
};

// Adds a part, to the block where each position counts as a sample, else to the gradients.
__device__ void add_part(const NormBlocks& arguments, int part, int channel, Block& block,
                         Gradients& gradients) {
  const Normalisation by = normalisation_of(arguments, part, channel);
  const PartSums sums(arguments, part, channel);
  const bool of_rows = arguments.statistics == NormStatistics::kOfRows;
  const double w = sums[kW], wy = sums[kWy], d = of_rows ? 0 : by.mean - sums[kShift];
  const double u = by.scale * (wy - d * w);
  if (arguments.input.squares) {
    block.uu += by.scale * by.scale * not_below_zero(sums[kWyy] - 2 * d * wy + d * d * w);
    block.uv += u;
    block.vv += w;
  } else {
    gradients.u += u;
    gradients.v += w;
  }
  if (arguments.statistics == NormStatistics::kOfBatch) {
    block.inputs.add(sums, positions_of(arguments, part), by.mean);
  }
}

// Adds all parts of a row of threads. Without `squares`, the rows of a warp share a sample that has
// several parts.
__device__ Block block_of_row(const NormBlocks& arguments, int channel, int row) {
  const int parts = static_cast<int>(arguments.input.samples * arguments.parts.per_sample);
  const int count = arguments.input.squares ? 1 : static_cast<int>(arguments.parts.per_sample);
  const int share = count >= kRowsOfWarp ? kRowsOfWarp : 1;
  Block block;
#pragma unroll 4
  for (int first = row / share * count; first < parts; first += kRows / share * count) {
    Gradients gradients;
#pragma unroll 4
    for (int part = first + row % share; part < first + count; part += share) {
      add_part(arguments, part, channel, block, gradients);
    }
    if (share > 1) {  // all threads of a warp have the same sample
      gradients.u = sum_of_lanes<kChannels, kWarp>(gradients.u);
      gradients.v = sum_of_lanes<kChannels, kWarp>(gradients.v);
    }
    if (row % share == 0) {
      block.uu += gradients.u * gradients.u;
      block.uv += gradients.u * gradients.v;
      block.vv += gradients.v * gradients.v;
    }
  }
  return block;
}

// In the first threads, one for each channel. In a fixed order.
__device__ Block sum_of_rows(const Block& block) {
  constexpr int kNumbers = 5;
  __shared__ double of_warps[kNumbers][kWarps][kChannels];
  const double numbers[kNumbers] = {block.uu, block.uv, block.vv, block.inputs.y, block.inputs.yy};
  const int thread = static_cast<int>(threadIdx.x);
  double sums[kNumbers];
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    sums[i] = sum_of_lanes<kChannels, kWarp>(numbers[i]);
    if (thread % kWarp < kChannels) of_warps[i][thread / kWarp][thread % kWarp] = sums[i];
  }
  __syncthreads();
  if (thread < kChannels) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
#pragma unroll
      for (int k = 1; k < kWarps; ++k) sums[i] += of_warps[i][k][thread];
    }
  }
  return {sums[0], sums[1], sums[2], {sums[3], sums[4]}};
}

__global__ void __launch_bounds__(kChannels* kRows) blocks_kernel(const NormBlocks arguments) {
  const NormInput& input = arguments.input;
  const int channel = static_cast<int>(blockIdx.x) * kChannels + threadIdx.x % kChannels;
  const int row = static_cast<int>(threadIdx.x) / kChannels;
  // Threads without a channel take part in sums of a warp.
  Block block = sum_of_rows(block_of_row(arguments, min(channel, input.channels - 1), row));
  if (row != 0 || channel >= input.channels) return;
  if (arguments.statistics == NormStatistics::kOfBatch) {
    const Normalisation by = block.inputs.normalisation(
        static_cast<double>(input.samples) * static_cast<double>(input.positions), arguments.eps);
    block.uu = by.scale * by.scale *
               not_below_zero(block.uu - 2 * by.mean * block.uv + by.mean * by.mean * block.vv);
    block.uv = by.scale * (block.uv - by.mean * block.vv);
  }
  const int order = arguments.order;
  float* target = arguments.blocks + static_cast<int64_t>(channel) * order * order;
  const auto store = [&](int entry, double sum) {
    target[entry] = static_cast<float>(arguments.accumulate ? target[entry] + sum : sum);
  };
  store(0, block.uu);
  if (order == 1) return;
  store(1, block.uv);
  target[2] = target[1];
  store(3, block.vv);
}

}  // namespace

cudaError_t norm_blocks(const NormBlocks& arguments, cudaStream_t stream) {
  if (arguments.statistics == NormStatistics::kOfGroups) {
    const auto blocks = static_cast<unsigned>(
        ceil_of(arguments.input.samples * arguments.groups, kGroupThreads / kWarp));
    groups_kernel<<<blocks, kGroupThreads, 0, stream>>>(arguments);
  }
  const auto blocks = static_cast<unsigned>(ceil_of(arguments.input.channels, kChannels));
  blocks_kernel<<<blocks, kChannels * kRows, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
