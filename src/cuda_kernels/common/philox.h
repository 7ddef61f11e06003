// The counter-based generator Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy
// as 1, 2, 3"): the same numbers on every device, in any order.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TORCHIUM_HOST_DEVICE __host__ __device__
#else
#define TORCHIUM_HOST_DEVICE
#endif

namespace torchium::cuda_kernels {

struct Philox4x32 {
  uint32_t word[4];
};

// Four numbers of the stream `stream` under the key `seed`, at position `counter`.
TORCHIUM_HOST_DEVICE inline Philox4x32 philox(uint64_t seed, uint64_t stream, uint64_t counter) {
  constexpr int kRounds = 10;
  constexpr uint64_t kMultiplier[2] = {0xD2511F53, 0xCD9E8D57};
  constexpr uint32_t kWeyl[2] = {0x9E3779B9, 0xBB67AE85};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  Philox4x32 x{{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)}};
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t a = kMultiplier[0] * x.word[0], b = kMultiplier[1] * x.word[2];
    x = {{static_cast<uint32_t>(b >> 32) ^ x.word[1] ^ key[0], static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ x.word[3] ^ key[1], static_cast<uint32_t>(a)}};
    key[0] += kWeyl[0];
    key[1] += kWeyl[1];
  }
  return x;
}

// Writes signs 4 group to 4 group + 3 of a stream, as far as they are below n, to the same places
// of `row`.
template <typename T>
TORCHIUM_HOST_DEVICE inline void write_signs(T* row, int64_t n, uint64_t seed, uint64_t stream,
                                             int64_t group) {
  const Philox4x32 x = philox(seed, stream, static_cast<uint64_t>(group));
  for (int i = 0; i < 4 && 4 * group + i < n; ++i) {
    row[4 * group + i] = (x.word[i] >> 31) != 0 ? T(-1) : T(1);
  }
}

}  // namespace torchium::cuda_kernels
