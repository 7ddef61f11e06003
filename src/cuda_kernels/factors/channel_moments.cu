#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/factors/element_packs.cuh"
#include "cuda_kernels/factors/norm_moments.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kBlocksPerProcessor = 2;    // channels-last: that many run at the same time
constexpr int64_t kMostPositions = 2048;  // of a part, channels first
constexpr int kSums = kShift;

// Packs of both tensors that a thread reads before it adds.
template <typename X, typename G>
constexpr int kInFlight = sizeof(X) + sizeof(G) > 4 ? 2 : 4;

// Of one channel.
struct Moments {
  float shift = 0;
  float sum[kSums]{};

  __device__ void add(float x, float g, bool squares) {
    const float y = x - shift, w = squares ? g * g : g, wy = w * y;
    sum[kW] += w;
    sum[kWy] += wy;
    sum[kWyy] = fmaf(wy, y, sum[kWyy]);
    sum[kY] += y;
    sum[kYy] = fmaf(y, y, sum[kYy]);
  }
};

// A single outlier is not the median.
__device__ float median(float a, float b, float c) {
  return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

// The positions [begin, end) of a part.
struct PartRange {
  int64_t sample, begin, end;

  __device__ PartRange(const NormInput& input, const NormParts& parts, int64_t part)
      : sample(part / parts.per_sample),
        begin(part % parts.per_sample * parts.positions),
        end(min(begin + parts.positions, input.positions)) {}
};

// The first, the middle and the last position of a part.
template <typename X, int N>
__device__ void set_shifts(Moments (&moments)[N], const X* x, const PartRange& range,
                           int64_t stride) {
  Pack<X, N> first, middle, last;
  first.load(x + range.begin * stride);
  middle.load(x + (range.begin + range.end) / 2 * stride);
  last.load(x + (range.end - 1) * stride);
#pragma unroll
  for (int i = 0; i < N; ++i) moments[i].shift = median(first[i], middle[i], last[i]);
}

// Adds `count` positions that lie `stride` elements apart.
template <typename X, typename G, int N>
__device__ void add_positions(Moments (&moments)[N], const X* x, const G* g, int64_t count,
                              int64_t stride, bool squares) {
  constexpr int kSteps = kInFlight<X, G>;
  for (int64_t first = 0; first < count;
       first += kSteps, x += kSteps * stride, g += kSteps * stride) {
    Pack<X, N> xs[kSteps];
    Pack<G, N> gs[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (first + k < count) {
        xs[k].load(x + k * stride);
        gs[k].load(g + k * stride);
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (first + k < count) {
#pragma unroll
        for (int i = 0; i < N; ++i) moments[i].add(xs[k][i], gs[k][i], squares);
      }
    }
  }
}

// Channels-last: a thread has N channels of some positions, and `width` threads, a power of two up
// to a warp, have those of one position.
template <typename X, typename G, int N>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    channels_last_kernel(const NormInput input, const NormParts parts, int width, float* sums) {
  __shared__ alignas(16) float of_warps[kSums][kWarps][kWarp * N];
  const int channels = input.channels, tiles = (channels + width * N - 1) / (width * N);
  const int64_t part = blockIdx.x / tiles;
  const int first_channel = static_cast<int>(blockIdx.x % tiles) * width * N;
  const int column = static_cast<int>(threadIdx.x) % width;
  const int row = static_cast<int>(threadIdx.x) / width, rows = kThreads / width;
  const int channel = first_channel + column * N;
  float* target = sums + part * kChannelPlanes * channels + first_channel;
  const PartRange range(input, parts, part);
  Moments moments[N];
  if (channel < channels) {
    const int64_t start = range.sample * input.positions * channels + channel;
    const X* x = static_cast<const X*>(input.x) + start;
    set_shifts(moments, x, range, channels);
    const int64_t position = range.begin + row;
    const int64_t count = (range.end - position + rows - 1) / rows;
    add_positions(moments, x + position * channels,
                  static_cast<const G*>(input.g) + start + position * channels, count,
                  int64_t{rows} * channels, input.squares);
    if (row == 0) {
      store_pack<N>(target + int64_t{kShift} * channels + column * N,
                    [&](int i) { return moments[i].shift; });
    }
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int plane = 0; plane < kSums; ++plane) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      moments[i].sum[plane] = sum_of_lanes(moments[i].sum[plane], width, kWarp);
    }
    if (lane < width) {
      store_pack<N>(&of_warps[plane][warp][lane * N], [&](int i) { return moments[i].sum[plane]; });
    }
  }
  __syncthreads();
  const int own = static_cast<int>(threadIdx.x);
  if (own >= width * N || first_channel + own >= channels) return;
#pragma unroll
  for (int plane = 0; plane < kSums; ++plane) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) sum += of_warps[plane][k][own];
    target[int64_t{plane} * channels + own] = sum;
  }
}

template <typename X, typename G, int N>
__device__ void add_range(Moments& moments, const X* x, const G* g, int64_t begin, int64_t end,
                          int lane, int lanes, bool squares) {
  constexpr int kSteps = N == 1 ? 1 : 2;
  for (int64_t first = begin + lane * N; first < end; first += kSteps * lanes * N) {
    Pack<X, N> xs[kSteps];
    Pack<G, N> gs[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t place = first + k * lanes * N;
      if (place < end) {
        xs[k].load(x + place);
        gs[k].load(g + place);
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (first + k * lanes * N < end) {
#pragma unroll
        for (int i = 0; i < N; ++i) moments.add(xs[k][i], gs[k][i], squares);
      }
    }
  }
}

// Channels first: `lanes` threads, a power of two up to a warp, have one channel of a part.
template <typename X, typename G>
__global__ void __launch_bounds__(kThreads)
    channels_first_kernel(const NormInput input, const NormParts parts, int lanes, bool by_packs,
                          float* sums) {
  const int64_t item =
      static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + static_cast<int>(threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t part = item / input.channels, channel = item % input.channels;
  const bool exists = part < input.samples * parts.per_sample;
  Moments moments;
  if (exists) {
    const PartRange range(input, parts, part);
    const int64_t start = (range.sample * input.channels + channel) * input.positions;
    const X* x = static_cast<const X*>(input.x) + start;
    const G* g = static_cast<const G*>(input.g) + start;
    const auto at = [&](int64_t position) { return static_cast<float>(x[position]); };
    moments.shift = median(at(range.begin), at((range.begin + range.end) / 2), at(range.end - 1));
    // Packs begin at multiples of kPack in the tensor.
    const int64_t before = (kPack - (start + range.begin) % kPack) % kPack;
    const int64_t first = by_packs ? min(range.begin + before, range.end) : range.end;
    const int64_t last = first + (range.end - first) / kPack * kPack;
    add_range<X, G, 1>(moments, x, g, range.begin, first, lane, lanes, input.squares);
    add_range<X, G, kPack>(moments, x, g, first, last, lane, lanes, input.squares);
    add_range<X, G, 1>(moments, x, g, last, range.end, lane, lanes, input.squares);
  }
#pragma unroll
  for (int plane = 0; plane < kChannelPlanes; ++plane) {
    const float sum = plane == kShift ? moments.shift : sum_of_lanes(moments.sum[plane], 1, lanes);
    if (exists && lane == 0) {
      sums[(part * kChannelPlanes + plane) * input.channels + channel] = sum;
    }
  }
}

int channels_of_thread(const NormInput& input) {
  return input.channels % kPack == 0 && has_packs(input.x, input.g) ? kPack : 1;
}

// Threads along the channels.
int width_of(const NormInput& input, int channels_of_thread) {
  return std::min(
      kWarp, next_power_of_two((input.channels + channels_of_thread - 1) / channels_of_thread));
}

}  // namespace

cudaError_t plan_channel_moments(const NormInput& input, bool channels_last, NormParts& parts) {
  int64_t wanted = ceil_of(input.positions, kMostPositions), multiple = kPack;
  if (channels_last) {
    int processors = 0;
    const cudaError_t error = count_processors(processors);
    if (error != cudaSuccess) return error;
    const int N = channels_of_thread(input), width = width_of(input, N);
    const int64_t others = input.samples * ceil_of(input.channels, int64_t{width} * N);
    // All blocks at the same time, or so many that the last ones matter little.
    const int64_t together = int64_t{processors} * kBlocksPerProcessor;
    wanted = std::max<int64_t>(1, together / others);
    if (wanted * others < together * 7 / 8) wanted = ceil_of(4 * together, others);
    multiple = 1;
  }
  if (!input.squares) wanted = std::min(wanted, kMostPartsOfSample);
  parts.positions = ceil_of(ceil_of(input.positions, wanted), multiple) * multiple;
  parts.per_sample = ceil_of(input.positions, parts.positions);
  return cudaSuccess;
}

cudaError_t channel_moments(const NormInput& input, bool channels_last, const NormParts& parts,
                            float* sums, cudaStream_t stream) {
  const int64_t all = input.samples * parts.per_sample;
  launch_for_types(input.x_type, input.g_type, [&](auto of_x, auto of_g) {
    using X = decltype(of_x);
    using G = decltype(of_g);
    if (!channels_last) {
      const int64_t longest = std::min(parts.positions, input.positions);
      const int lanes = std::clamp(next_power_of_two(ceil_of(longest, 2 * kPack)), 4, kWarp);
      const int64_t blocks = ceil_of(all * input.channels, kThreads / lanes);
      channels_first_kernel<X, G><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
          input, parts, lanes, has_packs(input.x, input.g), sums);
      return;
    }
    const int N = channels_of_thread(input), width = width_of(input, N);
    const auto blocks = static_cast<unsigned>(all * ceil_of(input.channels, int64_t{width} * N));
    if (N == kPack) {
      channels_last_kernel<X, G, kPack><<<blocks, kThreads, 0, stream>>>(input, parts, width, sums);
    } else {
      channels_last_kernel<X, G, 1><<<blocks, kThreads, 0, stream>>>(input, parts, width, sums);
    }
  });
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
