#include "cuda_kernels/split_gemm/split_fp16.cuh"

namespace torchium::cuda_kernels {
namespace {

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    find_largest_on_diagonals_kernel(const __grid_constant__ Table<SplitEntry, bytes> table) {
  const int tile = table.first_tile + static_cast<int>(blockIdx.x);
  const SplitEntry& entry = entry_of_tile(table, tile);
  const int64_t n = entry.order > 0 ? entry.order : entry.split.rows;
  const int64_t first = (tile - entry.first_tile) * n * n;
  unsigned most = 0;
  for (int64_t i = threadIdx.x; i < n; i += kElementThreads) {
    const float x = load_elements<1>(entry.x, entry.type, first + i * (n + 1)).lane[0];
    most = max(most, magnitude_bits(x));
  }
  record_largest(most, entry.largest);
}

// Four elements of the padded batch, from `i` on, which lie in one row.
__device__ Lanes<4> load_padded(const SplitEntry& entry, int64_t i) {
  const int64_t row_of_all = i / entry.split.columns, matrix = row_of_all / entry.split.rows;
  const int64_t row = row_of_all % entry.split.rows, column = i % entry.split.columns;
  const int64_t first = (matrix * entry.order + row) * entry.order + column;
  Lanes<4> x{};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (row < entry.order && column + k < entry.order) {
      x.lane[k] = load_elements<1>(entry.x, entry.type, first + k).lane[0];
    }
  }
  return x;
}

// Batches of fp16 parts have multiples of 8 columns, so four consecutive elements are always
// aligned.
template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    split_fp16_kernel(const __grid_constant__ Table<SplitEntry, bytes> table) {
  const int tile = table.first_tile + static_cast<int>(blockIdx.x);
  const SplitEntry& entry = entry_of_tile(table, tile);
  const SplitFp16& split = entry.split;
  // Up to rounding, the largest entry of a positive semi-definite matrix is on its diagonal.
  const float scale = scale_for(2 * __uint_as_float(*entry.largest));
  if (tile == entry.first_tile && threadIdx.x == 0) *split.scale = scale;
  const int64_t elements = int64_t{entry.matrices} * split.rows * split.columns;
  const int64_t begin = (tile - entry.first_tile) * kSplitTile;
  const int64_t end = min(begin + kSplitTile, elements);
  for (int64_t i = begin + 4 * threadIdx.x; i < end; i += 4 * kElementThreads) {
    const Lanes<4> x =
        entry.order > 0 ? load_padded(entry, i) : load_elements<4>(entry.x, entry.type, i);
    store_parts<4>(split.hi, split.lo, i, x, scale);
  }
}

}  // namespace

cudaError_t find_largest_on_diagonals(const Table<SplitEntry>& entries, cudaStream_t stream) {
  return launch_shortest(entries, [&](const auto& table) {
    find_largest_on_diagonals_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table);
  });
}

cudaError_t split_fp16(const Table<SplitEntry>& entries, cudaStream_t stream) {
  return launch_shortest(entries, [&](const auto& table) {
    split_fp16_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table);
  });
}

}  // namespace torchium::cuda_kernels
