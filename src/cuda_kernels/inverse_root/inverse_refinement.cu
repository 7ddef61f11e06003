#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/inverse_root/inverse_refinement.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kTile = 32;
constexpr int kRowGroups = 8;  // threads of a column
constexpr int kRowsPerThread = kTile / kRowGroups;
constexpr int kThreads = kTile * kRowGroups;

int tiles_across(int n) { return (n + kTile - 1) / kTile; }

// sums[r] = sum over k of left(i, k) right(k, j) for the entries (i, j) of this thread: row
// threadIdx.x / kTile + r kRowGroups and column threadIdx.x % kTile of a tile that begins at (row,
// column).
template <typename T, typename Left, typename Right>
__device__ void multiply(int n, int row, int column, const Left& left, const Right& right,
                         T (&sums)[kRowsPerThread]) {
  __shared__ T of_left[kTile][kTile + 1], of_right[kTile][kTile + 1];
  const int lane = threadIdx.x % kTile, group = threadIdx.x / kTile;
#pragma unroll
  for (T& sum : sums) sum = 0;
  for (int begin = 0; begin < n; begin += kTile) {
    for (int r = group; r < kTile; r += kRowGroups) {
      const bool has_left = row + r < n && begin + lane < n;
      const bool has_right = begin + r < n && column + lane < n;
      of_left[r][lane] = has_left ? left(row + r, begin + lane) : T{0};
      of_right[r][lane] = has_right ? right(begin + r, column + lane) : T{0};
    }
    __syncthreads();
    for (int k = 0; k < kTile; ++k) {
      const T y = of_right[k][lane];
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        sums[r] += of_left[group + r * kRowGroups][k] * y;
      }
    }
    __syncthreads();
  }
}

// Each block of both kernels: one tile of one matrix.
__global__ void __launch_bounds__(kThreads)
    residual_kernel(const __grid_constant__ InverseRefinement arguments, int across) {
  const int64_t matrix = blockIdx.x / (across * across);
  if (!arguments.wanted[matrix]) return;
  const int n = arguments.n, tile = static_cast<int>(blockIdx.x % (across * across));
  const int row = tile / across * kTile, column = tile % across * kTile;
  const float* A = arguments.A + matrix * n * n;
  const float* X = arguments.X + matrix * n * n;
  double sums[kRowsPerThread];
  multiply(
      n, row, column,
      [&](int i, int k) {
        const double of_diagonal = i == k ? arguments.damping : 0.0;
        return 0.5 * A[i * n + k] + 0.5 * A[k * n + i] + of_diagonal;
      },
      [&](int k, int j) { return double{X[k * n + j]}; }, sums);
  const int j = column + static_cast<int>(threadIdx.x % kTile);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int i = row + static_cast<int>(threadIdx.x / kTile) + r * kRowGroups;
    if (i >= n || j >= n) continue;
    const double rest = (i == j ? 1.0 : 0.0) - sums[r];
    arguments.residual[(matrix * n + i) * n + j] = static_cast<float>(rest);
  }
}

__global__ void __launch_bounds__(kThreads)
    refine_kernel(const __grid_constant__ InverseRefinement arguments, int tiles) {
  const int64_t matrix = blockIdx.x / tiles;
  if (!arguments.wanted[matrix]) return;
  const int n = arguments.n;
  const TriangleTile place(static_cast<int>(blockIdx.x % tiles));
  const int row = place.row * kTile, column = place.column * kTile;
  const float* X = arguments.X + matrix * n * n;
  const float* residual = arguments.residual + matrix * n * n;
  float* inverse = arguments.inverse + matrix * n * n;
  float sums[kRowsPerThread];
  multiply(
      n, row, column, [&](int i, int k) { return X[i * n + k]; },
      [&](int k, int j) { return residual[k * n + j]; }, sums);
  const int j = column + static_cast<int>(threadIdx.x % kTile);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int i = row + static_cast<int>(threadIdx.x / kTile) + r * kRowGroups;
    if (i >= n || j > i) continue;
    const float x = X[i * n + j], refined = x + sums[r];
    inverse[i * n + j] = inverse[j * n + i] = isfinite(refined) ? refined : x;
  }
}

}  // namespace

cudaError_t refine_inverse(const InverseRefinement& arguments, cudaStream_t stream) {
  if (arguments.matrices == 0) return cudaSuccess;
  const int across = tiles_across(arguments.n), tiles = triangle_tiles(across);
  residual_kernel<<<static_cast<unsigned>(arguments.matrices * across * across), kThreads, 0,
                    stream>>>(arguments, across);
  refine_kernel<<<static_cast<unsigned>(arguments.matrices * tiles), kThreads, 0, stream>>>(
      arguments, tiles);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
