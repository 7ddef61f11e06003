#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/factors/element_packs.cuh"
#include "cuda_kernels/factors/norm_moments.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

constexpr int kWarp = 32;
constexpr int kUsualThreads = 512, kMostThreads = kMostRowChannels / kPack;
constexpr int kMostWarpTeams = kUsualThreads / (2 * kWarp);  // of several warps each
constexpr int kBlocksPerProcessor = 2;

// A team has a row, and each of its threads kPack channels: a power of two up to a warp, or several
// warps.
struct Teams {
  int threads;  // of a team
  int count;    // of a block

  explicit Teams(int channels) {
    const int64_t packs = ceil_of(channels, kPack);
    threads =
        packs < kWarp ? next_power_of_two(packs) : static_cast<int>(ceil_of(packs, kWarp)) * kWarp;
    count = std::max(1, kUsualThreads / threads);
  }
};

// Sums over the threads of a team.
class TeamSums {
 public:
  __device__ TeamSums(const Teams& teams, int team, int thread)
      : threads_(teams.threads), team_(team), thread_(thread) {}

  // All threads of all teams call it.
  __device__ float operator()(float value) {
    value = sum_of_lanes(value, 1, min(threads_, kWarp));
    if (threads_ <= kWarp) return value;
    // Of the two buffers, a warp writes to the one that all warps had read before the last barrier.
    __shared__ float of_warps[2][kMostWarpTeams][kWarp];
    float* buffer = of_warps[turn_][team_];
    turn_ ^= 1;
    if (thread_ % kWarp == 0) buffer[thread_ / kWarp] = value;
    asm volatile("bar.sync %0, %1;" ::"r"(team_ + 1), "r"(threads_) : "memory");
    const int lane = thread_ % kWarp;
    return sum_of_lanes(lane < threads_ / kWarp ? buffer[lane] : 0, 1, kWarp);
  }

 private:
  int threads_, team_, thread_, turn_ = 0;
};

// A thread's channels of a row, side by side if N is kPack, else as far apart as the lanes.
template <int N>
struct RowPlaces {
  int first, step, channels;

  __device__ RowPlaces(const NormInput& input, const Teams& teams, int thread)
      : channels(input.channels) {
    const int lanes = min(teams.threads, kWarp);
    step = N == kPack ? 1 : lanes;
    first = N == kPack ? thread * kPack : thread / lanes * lanes * kPack + thread % lanes;
  }
  __device__ int operator[](int i) const { return first + i * step; }
  __device__ bool has(int i) const { return (*this)[i] < channels; }

  // Zeros past the last channel.
  template <typename Element>
  __device__ void load(const Element* row, float (&values)[kPack]) const {
    if constexpr (N == kPack) {
      Pack<Element, kPack> pack;
      if (has(0)) pack.load(row + first);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] = has(0) ? pack[i] : 0;
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        values[i] = has(i) ? static_cast<float>(row[(*this)[i]]) : 0;
      }
    }
  }
};

// values <- x^
template <int N>
__device__ void normalize(float (&values)[kPack], float first, const RowPlaces<N>& places,
                          const RowStatistics& statistics, TeamSums& team_sum) {
  const auto channels = static_cast<float>(places.channels);
  if (statistics.has_mean) {
    // From the first element on, because a mean that is much larger than the deviation would lose
    // digits.
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      values[i] = places.has(i) ? values[i] - first : 0;
      sum += values[i];
    }
    const float mean = team_sum(sum) / channels;
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = places.has(i) ? values[i] - mean : 0;
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPack; ++i) squares = fmaf(values[i], values[i], squares);
  const float scale = rsqrtf(team_sum(squares) / channels + static_cast<float>(statistics.eps));
#pragma unroll
  for (int i = 0; i < kPack; ++i) values[i] *= scale;
}

template <typename X, typename G, int N>
__global__ void __launch_bounds__(kMostThreads)
    rows_kernel(const NormInput input, const RowStatistics statistics, const NormParts parts,
                const Teams teams, float* sums) {
  __shared__ float of_teams[kMostThreads * kPack];
  const int team = static_cast<int>(threadIdx.x) / teams.threads;
  const int thread = static_cast<int>(threadIdx.x) % teams.threads;
  const RowPlaces<N> places(input, teams, thread);
  TeamSums team_sum(teams, team, thread);
  const int64_t part = blockIdx.x, sample = part / parts.per_sample;
  const int64_t begin = part % parts.per_sample * parts.positions;
  const int64_t end = min(begin + parts.positions, input.positions);
  float moments[kRowPlanes][kPack]{};
  for (int64_t first = begin; first < end; first += teams.count) {
    const int64_t position = min(first + team, end - 1);  // threads without a row repeat the last
    const int64_t start = (sample * input.positions + position) * input.channels;
    const X* row = static_cast<const X*>(input.x) + start;
    float x[kPack], g[kPack];
    places.load(row, x);
    places.load(static_cast<const G*>(input.g) + start, g);
    normalize(x, static_cast<float>(*row), places, statistics, team_sum);
    if (first + team >= end) continue;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float w = input.squares ? g[i] * g[i] : g[i], wy = w * x[i];
      moments[kW][i] += w;
      moments[kWy][i] += wy;
      moments[kWyy][i] = fmaf(wy, x[i], moments[kWyy][i]);
    }
  }
  // Teams of one warp are added in registers, all others here.
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool in_warp = teams.threads < kWarp;
  const int lists = in_warp ? static_cast<int>(blockDim.x) / kWarp : teams.count;
  const int list = in_warp ? static_cast<int>(threadIdx.x) / kWarp : team;
  const int columns = teams.threads * kPack;
#pragma unroll
  for (int plane = 0; plane < kRowPlanes; ++plane) {
    __syncthreads();  // the sums of the last plane have been read
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float sum =
          in_warp ? sum_of_lanes(moments[plane][i], teams.threads, kWarp) : moments[plane][i];
      if (!in_warp || lane < teams.threads) of_teams[list * columns + places[i]] = sum;
    }
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < input.channels;
         c += static_cast<int>(blockDim.x)) {
      float sum = 0;
      for (int k = 0; k < lists; ++k) sum += of_teams[k * columns + c];
      sums[(part * kRowPlanes + plane) * input.channels + c] = sum;
    }
  }
}

}  // namespace

cudaError_t plan_row_moments(const NormInput& input, NormParts& parts) {
  int processors = 0;
  const cudaError_t error = count_processors(processors);
  if (error != cudaSuccess) return error;
  int64_t wanted = ceil_of(int64_t{processors} * kBlocksPerProcessor, input.samples);
  if (!input.squares) wanted = std::min(wanted, kMostPartsOfSample);
  const int teams = Teams(input.channels).count;
  parts.positions = ceil_of(ceil_of(input.positions, wanted), teams) * teams;
  parts.per_sample = ceil_of(input.positions, parts.positions);
  return cudaSuccess;
}

cudaError_t row_moments(const NormInput& input, const RowStatistics& statistics,
                        const NormParts& parts, float* sums, cudaStream_t stream) {
  const Teams teams(input.channels);
  const auto blocks = static_cast<unsigned>(input.samples * parts.per_sample);
  const int threads = teams.threads * teams.count;
  launch_for_types(input.x_type, input.g_type, [&](auto of_x, auto of_g) {
    using X = decltype(of_x);
    using G = decltype(of_g);
    if (input.channels % kPack == 0 && has_packs(input.x, input.g)) {
      rows_kernel<X, G, kPack>
          <<<blocks, threads, 0, stream>>>(input, statistics, parts, teams, sums);
    } else {
      rows_kernel<X, G, 1><<<blocks, threads, 0, stream>>>(input, statistics, parts, teams, sums);
    }
  });
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
