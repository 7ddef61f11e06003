// The parameters of a step as a table in the arguments of a kernel, so that one launch processes
// hundreds of them and nothing is copied to the device beforehand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cuda_runtime_api.h>

#ifdef __CUDACC__
#define TORCHIUM_HOST_DEVICE __host__ __device__
#else
#define TORCHIUM_HOST_DEVICE
#endif

namespace torchium::cuda_kernels {

enum class ElementType : uint8_t { kFloat, kBFloat16, kHalf, kDouble };

// Arguments of a kernel may take 32,764 bytes. They are copied several times, which takes as long
// as the rest of a launch.
constexpr int kTableBytes = 32 * 1024 - 256;
constexpr int kShortTableBytes = 6 * 1024;

// A list of entries. Each has consecutive tiles; a tile is the work of one thread block.
template <typename Entry, int bytes = kTableBytes>
struct Table {
  static constexpr int kCapacity = (bytes - 16) / sizeof(Entry);

  Table() {}  // leaves the entries as they are
  int tiles() const { return end_tile - first_tile; }

  int count = 0;
  int first_tile = 0;  // of the first entry
  int end_tile = 0;
  Entry entries[kCapacity];
};

template <typename Entry>
using ShortTable = Table<Entry, kShortTableBytes>;

// launch(table), or with a short one that has the same entries if they fit in there. Returns the
// error of the launch.
template <typename Entry, typename Launch>
cudaError_t launch_shortest(const Table<Entry>& table, const Launch& launch) {
  if (table.count > ShortTable<Entry>::kCapacity) {
    launch(table);
  } else {
    ShortTable<Entry> fitting;
    fitting.count = table.count;
    fitting.first_tile = table.first_tile;
    fitting.end_tile = table.end_tile;
    std::copy_n(table.entries, table.count, fitting.entries);
    launch(fitting);
  }
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
