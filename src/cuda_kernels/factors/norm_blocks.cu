#include "cuda_kernels/factors/element_packs.cuh"
#include "cuda_kernels/factors/norm_moments.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kChannels = 8, kRows = 64;  // threads of a block: along channels, and across parts
constexpr int kGroupThreads = 128;

// The mean and 1 / sqrt(variance + eps) of what a channel is normalised by.
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

  // Sums of x and of (x - mean)^2 over `count` positions.
  __device__ double of_inputs(double count) const { return count * (*this)[kShift] + (*this)[kY]; }
  __device__ double of_squares(double count, double mean) const {
    const double d = mean - (*this)[kShift];
    return (*this)[kYy] - 2 * d * (*this)[kY] + count * d * d;
  }

 private:
  const float* first_;
  int64_t channels_;
};

__device__ int parts_of(const NormBlocks& arguments) {
  return static_cast<int>(arguments.input.samples * arguments.parts.per_sample);
}

__device__ double positions_of(const NormBlocks& arguments, int part) {
  const int64_t begin =
      part % static_cast<int>(arguments.parts.per_sample) * arguments.parts.positions;
  const int64_t left = arguments.input.positions - begin;
  return static_cast<double>(min(left, arguments.parts.positions));
}

// Adds over `rows` threads that lie `width` apart, in a fixed order; the result is in all of them.
template <int width, int rows>
__device__ double sum_of_rows(double value) {
  __shared__ double sums[rows][width];
  const int column = static_cast<int>(threadIdx.x) % width;
  const int row = static_cast<int>(threadIdx.x) / width;
  __syncthreads();  // the last result has been read
  sums[row][column] = value;
  for (int half = rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) sums[row][column] += sums[row + half][column];
  }
  __syncthreads();
  return sums[0][column];
}

// NaN stays NaN.
__device__ double not_below_zero(double x) { return x < 0 ? 0 : x; }

__device__ double scale_of(double variance, double eps) {
  return 1 / sqrt(not_below_zero(variance) + eps);
}

// A block has the channels of one group in one sample.
__global__ void __launch_bounds__(kGroupThreads) groups_kernel(const NormBlocks arguments) {
  const int64_t sample = blockIdx.x / arguments.groups;
  const int group = static_cast<int>(blockIdx.x % arguments.groups);
  const int channels = arguments.input.channels / arguments.groups;
  const int first = static_cast<int>(sample * arguments.parts.per_sample);
  const int64_t items = arguments.parts.per_sample * channels;
  const double count = static_cast<double>(arguments.input.positions) * channels;
  const auto sum_over_items = [&](const auto& term) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < items; i += kGroupThreads) {
      const int part = first + static_cast<int>(i / channels);
      const PartSums sums(arguments, part, group * channels + static_cast<int>(i % channels));
      sum += term(sums, positions_of(arguments, part));
    }
    return sum_of_rows<1, kGroupThreads>(sum);
  };
  const double mean =
      sum_over_items([](const PartSums& sums, double n) { return sums.of_inputs(n); }) / count;
  const double variance =
      sum_over_items([&](const PartSums& sums, double n) { return sums.of_squares(n, mean); }) /
      count;
  if (threadIdx.x != 0) return;
  double* target = arguments.of_groups + 2 * (sample * arguments.groups + group);
  target[0] = mean;
  target[1] = scale_of(variance, arguments.eps);
}

// Of one channel, whatever the sample. All threads call it.
__device__ Normalisation normalisation_of(const NormBlocks& arguments, int channel, int row) {
  const bool exists = channel < arguments.input.channels;
  if (arguments.statistics == NormStatistics::kGiven && exists) {
    return {load(arguments.mean, arguments.mean_type, channel),
            scale_of(load(arguments.variance, arguments.variance_type, channel), arguments.eps)};
  }
  if (arguments.statistics != NormStatistics::kOfBatch) return {0, 1};
  const int parts = exists ? parts_of(arguments) : 0;
  const double count = static_cast<double>(arguments.input.samples) * arguments.input.positions;
  double sum = 0;
  for (int part = row; part < parts; part += kRows) {
    sum += PartSums(arguments, part, channel).of_inputs(positions_of(arguments, part));
  }
  const double mean = sum_of_rows<kChannels, kRows>(sum) / count;
  sum = 0;
  for (int part = row; part < parts; part += kRows) {
    sum += PartSums(arguments, part, channel).of_squares(positions_of(arguments, part), mean);
  }
  return {mean, scale_of(sum_of_rows<kChannels, kRows>(sum) / count, arguments.eps)};
}

// The sums of u^2, u v and v^2.
struct Block {
  double uu = 0, uv = 0, vv = 0;
};

// Adds a sample or, where each position counts as one, a part: the parts [first, first + count).
__device__ void add_parts(const NormBlocks& arguments, int first, int count, int channel,
                          const Normalisation& of_channel, Block& block) {
  Normalisation by = of_channel;
  if (arguments.statistics == NormStatistics::kOfGroups) {
    const int64_t sample = first / arguments.parts.per_sample;
    const int group = channel / (arguments.input.channels / arguments.groups);
    const double* its = arguments.of_groups + 2 * (sample * arguments.groups + group);
    by = {its[0], its[1]};
  }
  const bool of_rows = arguments.statistics == NormStatistics::kOfRows;
  double u = 0, v = 0;
#pragma unroll 4
  for (int part = first; part < first + count; ++part) {
    const PartSums sums(arguments, part, channel);
    const double w = sums[kW], d = of_rows ? 0 : by.mean - sums[kShift];
    u += by.scale * (sums[kWy] - d * w);  // of w x^
    v += w;
  }
  if (!arguments.input.squares) {
    block.uu += u * u;
    block.uv += u * v;
    block.vv += v * v;
    return;
  }
  const PartSums sums(arguments, first, channel);
  const double w = sums[kW], d = of_rows ? 0 : by.mean - sums[kShift];
  block.uu += by.scale * by.scale * not_below_zero(sums[kWyy] - 2 * d * sums[kWy] + d * d * w);
  block.uv += u;
  block.vv += v;
}

__global__ void __launch_bounds__(kChannels* kRows) blocks_kernel(const NormBlocks arguments) {
  const int channel = static_cast<int>(blockIdx.x) * kChannels + threadIdx.x % kChannels;
  const int row = static_cast<int>(threadIdx.x) / kChannels;
  const Normalisation by = normalisation_of(arguments, channel, row);
  Block block;
  if (channel < arguments.input.channels) {
    const int count = arguments.input.squares ? 1 : static_cast<int>(arguments.parts.per_sample);
    for (int first = row * count; first < parts_of(arguments); first += kRows * count) {
      add_parts(arguments, first, count, channel, by, block);
    }
  }
  block.uu = sum_of_rows<kChannels, kRows>(block.uu);
  block.uv = sum_of_rows<kChannels, kRows>(block.uv);
  block.vv = sum_of_rows<kChannels, kRows>(block.vv);
  if (row != 0 || channel >= arguments.input.channels) return;
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
    const auto blocks = static_cast<unsigned>(arguments.input.samples * arguments.groups);
    groups_kernel<<<blocks, kGroupThreads, 0, stream>>>(arguments);
  }
  const auto blocks = static_cast<unsigned>(ceil_of(arguments.input.channels, kChannels));
  blocks_kernel<<<blocks, kChannels * kRows, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
