#include "cuda_kernels/common/element_access.cuh"
#include "cuda_kernels/factors/triangles.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kTile = TriangleEntry::kTile;
constexpr int kRowsAtOnce = kElementThreads / kTile;

// The part of a matrix that a thread block processes.
struct MatrixTile {
  float* matrix;
  float* triangle;
  int n, row, column;

  __device__ MatrixTile(const TriangleEntry& entry, int tile) : n(entry.n) {
    const int per_matrix = entry.tiles_per_matrix();
    const int64_t index = (tile - entry.first_tile) / per_matrix;
    const TriangleTile place((tile - entry.first_tile) % per_matrix);
    matrix = entry.matrices + index * n * n;
    triangle = entry.triangles + index * (int64_t{n} * (n + 1) / 2);
    row = place.row * kTile;
    column = place.column * kTile;
  }

  // Calls f(i, j, a, t) for the elements on and below the diagonal: i, j in the tile, its place a
  // in the matrix and t in the triangle.
  template <typename F>
  __device__ void for_each(const F& f) const {
    const int j = static_cast<int>(threadIdx.x) % kTile;
    for (int i = static_cast<int>(threadIdx.x) / kTile; i < kTile; i += kRowsAtOnce) {
      const int64_t r = row + i, c = column + j;
      if (r < n && c <= r) f(i, j, r * n + c, r * (r + 1) / 2 + c);
    }
  }
};

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    pack_kernel(const __grid_constant__ Table<TriangleEntry, bytes> entries) {
  const int tile = entries.first_tile + static_cast<int>(blockIdx.x);
  const MatrixTile its(entry_of_tile(entries, tile), tile);
  its.for_each([&](int, int, int64_t a, int64_t t) { its.triangle[t] = its.matrix[a]; });
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    unpack_kernel(const __grid_constant__ Table<TriangleEntry, bytes> entries) {
  __shared__ float values[kTile][kTile + 1];
  const int tile = entries.first_tile + static_cast<int>(blockIdx.x);
  const MatrixTile its(entry_of_tile(entries, tile), tile);
  its.for_each([&](int i, int j, int64_t a, int64_t t) {
    values[i][j] = its.triangle[t];
    its.matrix[a] = values[i][j];
  });
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x) % kTile;  // columns of the upper triangle
  for (int j = static_cast<int>(threadIdx.x) / kTile; j < kTile; j += kRowsAtOnce) {
    const int64_t r = its.row + i, c = its.column + j;
    if (r < its.n && c < r) its.matrix[c * its.n + r] = values[i][j];
  }
}

}  // namespace

cudaError_t pack_triangles(const Table<TriangleEntry>& entries, cudaStream_t stream) {
  return launch_shortest(entries, [&](const auto& table) {
    pack_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table);
  });
}

cudaError_t unpack_triangles(const Table<TriangleEntry>& entries, cudaStream_t stream) {
  return launch_shortest(entries, [&](const auto& table) {
    unpack_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table);
  });
}

}  // namespace torchium::cuda_kernels
