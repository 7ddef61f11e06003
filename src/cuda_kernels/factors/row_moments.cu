#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/factors/element_packs.cuh"
#include "cuda_kernels/factors/norm_moments.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

constexpr int kWarp = 32;
constexpr int kUsualThreads = 512, kMostThreads = kMostRowChannels / kPack;
constexpr int kMostWarpTeams = kUsualThreads / (2 * kWarp);  // of several warps each
constexpr int kMostPacks = 4;                                // of a thread

// Threads of a block whose threads have `packs` packs each: as many as the registers allow.
constexpr int usual_threads(int packs) {
  return packs == 1 ? kUsualThreads : packs == 2 ? 512 : packs == 3 ? 384 : 256;
}
constexpr int most_threads(int packs) { return packs == 1 ? kMostThreads : usual_threads(packs); }

// A team has a row. It is a warp or less, a power of two, or several warps.
struct Teams {
  int packs;    // of a thread: 1 unless the team is one warp
  int threads;  // of a team
  int count;    // of a block

  Teams(int channels, bool by_packs) {
    const auto all = static_cast<int>(ceil_of(channels, kPack));
    packs = by_packs && all <= kWarp * kMostPacks ? static_cast<int>(ceil_of(all, kWarp)) : 1;
    threads = packs > 1     ? kWarp
              : all < kWarp ? next_power_of_two(all)
                            : static_cast<int>(ceil_of(all, kWarp)) * kWarp;
    count = std::max(1, usual_threads(packs) / threads);
  }
  // Blocks that run at the same time.
  int blocks_per_processor() const { return packs > 1 ? 1 : 2; }
};

bool by_packs(const NormInput& input) {
  return input.channels % kPack == 0 && has_packs(input.x, input.g);
}

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

// A thread's channels of a row: packs that lie a team apart, or without `packed` single channels
// that lie a warp apart.
template <int packs, bool packed>
struct RowPlaces {
  static constexpr int kCount = packs * kPack;
  int first, step, channels;

  __device__ RowPlaces(const NormInput& input, const Teams& teams, int thread)
      : channels(input.channels) {
    const int lanes = min(teams.threads, kWarp);
    step = packed ? teams.threads * kPack : lanes;
    first = packed ? thread * kPack : thread / lanes * lanes * kPack + thread % lanes;
  }
  __device__ int operator[](int i) const {
    return packed ? first + i / kPack * step + i % kPack : first + i * step;
  }
  __device__ bool has(int i) const { return (*this)[packed ? i / kPack * kPack : i] < channels; }

  // Zeros past the last channel.
  template <typename Element>
  __device__ void load(const Element* row, float (&values)[kCount]) const {
    if constexpr (packed) {
      Pack<Element, kPack> pack[packs];
#pragma unroll
      for (int k = 0; k < packs; ++k) {
        if (has(k * kPack)) pack[k].load(row + (*this)[k * kPack]);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = has(i) ? pack[i / kPack][i % kPack] : 0;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = has(i) ? static_cast<float>(row[(*this)[i]]) : 0;
      }
    }
  }

  // Those of shared memory, for all channels of a team.
  __device__ void store(float* list, const float (&values)[kCount]) const {
    if constexpr (packed) {
#pragma unroll
      for (int k = 0; k < packs; ++k) {
        store_pack<kPack>(list + (*this)[k * kPack], [&](int i) { return values[k * kPack + i]; });
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) list[(*this)[i]] = values[i];
    }
  }
};

// values <- x^
template <typename Places>
__device__ void normalize(float (&values)[Places::kCount], float first, const Places& places,
                          const RowStatistics& statistics, TeamSums& team_sum) {
  const auto channels = static_cast<float>(places.channels);
  if (statistics.has_mean) {
    // From the first element on, because a mean that is much larger than the deviation would lose
    // digits.
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Places::kCount; ++i) {
      values[i] = places.has(i) ? values[i] - first : 0;
      sum += values[i];
    }
    const float mean = team_sum(sum) / channels;
#pragma unroll
    for (int i = 0; i < Places::kCount; ++i) values[i] = places.has(i) ? values[i] - mean : 0;
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < Places::kCount; ++i) squares = fmaf(values[i], values[i], squares);
  const float scale = rsqrtf(team_sum(squares) / channels + static_cast<float>(statistics.eps));
#pragma unroll
  for (int i = 0; i < Places::kCount; ++i) values[i] *= scale;
}

// Writes the sums of all teams of a block.
template <typename Places>
__device__ void store_moments(float (&moments)[kRowPlanes][Places::kCount], const Places& places,
                              const Teams& teams, int team, float* sums) {
  constexpr int kFloats = kMostThreads * kPack, kOfThree = usual_threads(3) * 3 * kPack;
  __shared__ alignas(16) float of_teams[kFloats > kOfThree ? kFloats : kOfThree];
  // Teams of one warp are added in registers, all others here.
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool in_warp = teams.threads < kWarp;
  const int lists = in_warp ? static_cast<int>(blockDim.x) / kWarp : teams.count;
  const int list = in_warp ? static_cast<int>(threadIdx.x) / kWarp : team;
  const int columns = teams.threads * Places::kCount;
#pragma unroll
  for (int plane = 0; plane < kRowPlanes; ++plane) {
    if (in_warp) {
#pragma unroll
      for (float& sum : moments[plane]) sum = sum_of_lanes(sum, teams.threads, kWarp);
    }
    __syncthreads();  // the sums of the last plane have been read
    if (!in_warp || lane < teams.threads) places.store(of_teams + list * columns, moments[plane]);
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < places.channels;
         c += static_cast<int>(blockDim.x)) {
      float sum = 0;
#pragma unroll 4
      for (int k = 0; k < lists; ++k) sum += of_teams[k * columns + c];
      sums[int64_t{plane} * places.channels + c] = sum;
    }
  }
}

template <typename X, typename G, int packs, bool packed>
__global__ void __launch_bounds__(most_threads(packs))
    rows_kernel(const NormInput input, const RowStatistics statistics, const NormParts parts,
                const Teams teams, float* sums) {
  using Places = RowPlaces<packs, packed>;
  const int team = static_cast<int>(threadIdx.x) / teams.threads;
  const int thread = static_cast<int>(threadIdx.x) % teams.threads;
  const Places places(input, teams, thread);
  TeamSums team_sum(teams, team, thread);
  const int64_t part = blockIdx.x, sample = part / parts.per_sample;
  const int64_t begin = part % parts.per_sample * parts.positions;
  const int64_t end = min(begin + parts.positions, input.positions);
  float moments[kRowPlanes][Places::kCount]{};
  for (int64_t first = begin; first < end; first += teams.count) {
    const int64_t position = min(first + team, end - 1);  // threads without a row repeat the last
    const int64_t start = (sample * input.positions + position) * input.channels;
    const X* row = static_cast<const X*>(input.x) + start;
    float x[Places::kCount], g[Places::kCount];
    places.load(row, x);
    places.load(static_cast<const G*>(input.g) + start, g);
    normalize(x, static_cast<float>(*row), places, statistics, team_sum);
    if (first + team >= end) continue;
#pragma unroll
    for (int i = 0; i < Places::kCount; ++i) {
      const float w = input.squares ? g[i] * g[i] : g[i], wy = w * x[i];
      moments[kW][i] += w;
      moments[kWy][i] += wy;
      moments[kWyy][i] = fmaf(wy, x[i], moments[kWyy][i]);
    }
  }
  store_moments(moments, places, teams, team, sums + part * kRowPlanes * input.channels);
}

template <typename X, typename G>
void launch_rows(const NormInput& input, const RowStatistics& statistics, const NormParts& parts,
                 float* sums, cudaStream_t stream) {
  const bool packed = by_packs(input);
  const Teams teams(input.channels, packed);
  const auto blocks = static_cast<unsigned>(input.samples * parts.per_sample);
  const int threads = teams.threads * teams.count;
  const auto launch = [&](auto kernel) {
    kernel<<<blocks, threads, 0, stream>>>(input, statistics, parts, teams, sums);
  };
  if (!packed) return launch(rows_kernel<X, G, 1, false>);
  switch (teams.packs) {
    case 1:
      return launch(rows_kernel<X, G, 1, true>);
    case 2:
      return launch(rows_kernel<X, G, 2, true>);
    case 3:
      return launch(rows_kernel<X, G, 3, true>);
    default:
      return launch(rows_kernel<X, G, kMostPacks, true>);
  }
}

}  // namespace

cudaError_t plan_row_moments(const NormInput& input, NormParts& parts) {
  int processors = 0;
  const cudaError_t error = count_processors(processors);
  if (error != cudaSuccess) return error;
  const Teams teams(input.channels, by_packs(input));
  int64_t wanted = ceil_of(int64_t{processors} * teams.blocks_per_processor(), input.samples);
  if (!input.squares) wanted = std::min(wanted, kMostPartsOfSample);
  parts.positions = ceil_of(input.positions, wanted);
  parts.per_sample = ceil_of(input.positions, parts.positions);
  return cudaSuccess;
}

cudaError_t row_moments(const NormInput& input, const RowStatistics& statistics,
                        const NormParts& parts, float* sums, cudaStream_t stream) {
  launch_for_types(input.x_type, input.g_type, [&](auto of_x, auto of_g) {
    launch_rows<decltype(of_x), decltype(of_g)>(input, statistics, parts, sums, stream);
  });
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
