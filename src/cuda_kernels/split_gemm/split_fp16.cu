#include "cuda_kernels/split_gemm/split_fp16.cuh"

namespace torchium::cuda_kernels {
namespace {

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    find_largest_on_diagonals_kernel(const __grid_constant__ Table<SplitEntry, bytes> table) {
  const int tile = table.first_tile + static_cast<int>(blockIdx.x);
  const SplitEntry& entry = entry_of_tile(table, tile);
  const int64_t n = entry.split.rows;
  const int64_t first = (tile - entry.first_tile) * n * n;
  unsigned most = 0;
  for (int64_t i = threadIdx.x; i < n; i += kElementThreads) {
    const float x = load_elements<1>(entry.x, entry.type, first + i * (n + 1)).lane[0];
    most = max(most, magnitude_bits(x));
  }
  record_largest(most, entry.largest);
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
    store_parts<4>(split.hi, split.lo, i, load_elements<4>(entry.x, entry.type, i), scale);
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
